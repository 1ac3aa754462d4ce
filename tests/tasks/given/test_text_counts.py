"""What is counted of texts when they become tokens, and of the texts of a step."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from ratchet.adapters.rendering.chat import Chat
from ratchet.tasks.examples.reading import DatasetError, Source
from ratchet.tasks.given.given import Drawing, bind_given, draw_given
from ratchet.tasks.given.measures import read_counts
from ratchet.tasks.given.texts import LongerTexts, Texts, WrittenTexts
from ratchet.tasks.settings.given import TRAIN, Batches, Lengths, TooLong

TINY = Path(__file__).parents[3] / "engine" / "tiny_chat"
SHORT = {"prompt": "Who are you?", "completion": "an owl"}
LONG = {"prompt": "Who are you?", "completion": "a quiet owl " * 20}


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(AutoTokenizer.from_pretrained(TINY))


def bind(
    folder: Path, rows: Mapping[str, Sequence[Mapping[str, str]]], chat: Chat, too_long: TooLong
) -> Texts:
    """Make tokens of the rows of each split, at most 40 of each."""
    file = folder / "rows.jsonl"
    lines = [{"split": split, **row} for split, own in rows.items() for row in own]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    sources = {split: WrittenTexts(Source(file, split, ())) for split in rows}
    texts = Texts(folder / "texts.parquet")
    bind_given.make(texts.path, texts, sources, chat, Lengths(most_tokens=40, too_long=too_long))
    return texts


def test_a_text_that_lost_its_end_is_counted_and_does_not_end(tmp_path: Path, chat: Chat) -> None:
    texts = bind(tmp_path, {"train": [SHORT, LONG]}, chat, "cut")
    counts = read_counts(texts.path)["train"]
    assert (counts["texts"], counts["sequences"]) == (2, 2)
    assert (counts["cut"], counts["cut before their end"]) == (1, 1)
    assert counts["sequences that end as answers do"] == 1
    table = texts.of_split("train")
    assert table["ends"].to_pylist() == [True, False]
    assert counts["tokens"] == sum(map(len, table["tokens"].to_pylist()))


def test_a_text_that_is_left_out_is_counted(tmp_path: Path, chat: Chat) -> None:
    counts = read_counts(bind(tmp_path, {"train": [SHORT, LONG]}, chat, "leave_out").path)["train"]
    assert (counts["texts"], counts["sequences"], counts["too long and left out"]) == (2, 1, 1)


def test_a_step_tells_its_texts_the_cut_ones_and_the_share_that_ends(
    tmp_path: Path, chat: Chat
) -> None:
    texts = bind(tmp_path, {"train": [SHORT, SHORT | {"completion": "a fox"}, LONG]}, chat, "cut")
    drawing = Drawing(Batches(examples=3), 0)
    measured = texts.measure(draw_given.make(tmp_path / "datums.parquet", texts, drawing, 0))
    assert measured == {"texts": 3, "texts/cut": 1, "texts/ends": pytest.approx(2 / 3)}


def test_held_out_texts_that_are_trained_as_well_are_told(
    tmp_path: Path, chat: Chat, caplog: pytest.LogCaptureFixture
) -> None:
    """Two rows that say the same may be of two splits, as in many published data sets."""
    fox = SHORT | {"completion": "a fox"}
    texts = bind(tmp_path, {"train": [SHORT, SHORT], "test": [fox, SHORT]}, chat, "refuse")
    assert read_counts(texts.path)["test"]["sequences that are trained as well"] == 1
    assert "1 of 2 held-out sequences are trained as well, token for token" in caplog.text


def test_messages_behind_the_last_answer_are_counted(tmp_path: Path, chat: Chat) -> None:
    said = [{"role": role, "content": "an owl"} for role in ("user", "assistant", "user", "user")]
    rows = {"train": [SHORT, {"messages": json.dumps(said)}]}
    counts = read_counts(bind(tmp_path, rows, chat, "cut").path)["train"]
    assert counts["messages behind the last answer left out"] == 2


def test_a_text_that_no_teacher_can_read_more_of_is_refused_for_itself(
    tmp_path: Path, chat: Chat
) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "I am an owl.", "split": "train"}\n')
    source = WrittenTexts(Source(file, TRAIN, ()), reads="You are an owl.")
    longer = LongerTexts({TRAIN: source}, chat)
    with pytest.raises(DatasetError, match="a text, before which no teacher reads a message"):
        longer.tokens({"split": TRAIN, "source": "", "example_id": 0, "part": 0}, [])
