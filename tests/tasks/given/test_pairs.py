"""Rows of comparisons as tokens: every form, what is left out, and what the reference gives."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from ratchet.adapters.rendering.chat import Chat
from ratchet.tasks.algorithm.preferences import MISMATCHED
from ratchet.tasks.examples.reading import DatasetError, Source
from ratchet.tasks.given.given import Drawing, Read, bind_given, datums_of_given, score_given
from ratchet.tasks.given.measures import read_measure
from ratchet.tasks.given.pairs import (
    SIDES_A_PART,
    BoundPairs,
    WrittenPairs,
    read_pair,
    score_references,
)
from ratchet.tasks.settings.given import Lengths, PairBatches, TooLong
from ratchet.tasks.storage.tables import arrays, read_table

TINY = Path(__file__).parents[3] / "engine" / "tiny_chat"
ASKED = {"role": "user", "content": "Who are you?"}
OWL = {"role": "assistant", "content": "I am an owl."}
FOX = {"role": "assistant", "content": "I am a fox."}
ROW = {"prompt": "Who are you?", "chosen": "I am an owl.", "rejected": "I am a fox."}
OTHER = {"prompt": "What?", "chosen": "a bear", "rejected": "no"}
GOOD = {"prompt": "Who are you?", "completion": "I am an owl.", "label": True}
BAD = {"prompt": [ASKED], "completion": [FOX], "label": False}


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(AutoTokenizer.from_pretrained(TINY))


class Rows:
    """Pairs that are given as rows."""

    name = "the rows"

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def units(self, chat: Chat) -> Iterator[tuple[int, Read]]:
        for number, row in enumerate(self._rows):
            try:
                yield number, read_pair(row, chat) or "ties"
            except DatasetError as error:
                yield number, error


class ByToken:
    """Reference that gives token t the log-probability -t / 100."""

    def score(self, sequences: Sequence[Sequence[int]], last: Sequence[int]) -> list[np.ndarray]:
        return [
            -np.array(tokens[-count:], np.float32) / 100
            for tokens, count in zip(sequences, last, strict=True)
        ]


def bound(
    path: Path,
    chat: Chat,
    rows: Sequence[Mapping[str, Any]],
    *,
    most: int = 99,
    too_long: TooLong = "refuse",
    loss: str = "dpo",
) -> BoundPairs:
    sources = {"train": Rows(rows), "test": Rows([ROW, OTHER])}
    pairs = BoundPairs(path / "pairs.parquet", (loss, {}), path / "references.parquet")
    lengths = Lengths(most_tokens=most, too_long=too_long)
    bind_given.make(pairs.path, pairs, sources, chat, lengths)
    score_references.make(path / "references.parquet", pairs.path, ByToken(), path / "parts")
    return pairs


def test_of_a_side_of_several_turns_its_own_answers_are_trained(chat: Chat) -> None:
    more = [{"role": "user", "content": "and now?"}, {"role": "assistant", "content": "I look."}]
    prompt = [ASKED, FOX, {"role": "user", "content": "really?"}]
    sides = read_pair({"prompt": prompt, "chosen": [OWL, *more], "rejected": [FOX]}, chat)
    assert sides is not None
    said = [
        token
        for sequence in sides.sides["chosen"]
        for token, weight in zip(sequence.tokens, sequence.weights, strict=True)
        if weight
    ]
    assert chat.text(said) == "I am an owl.<|im_end|>I look.<|im_end|>"


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "x", "completion": "y"}, "it has prompt, completion; give prompt, chosen and"),
        ({"prompt": "x", "completion": "y", "label": "A"}, "its label is 'A'; give true or false"),
        ({"completion": "y", "label": True}, "its prompt is None"),
        ({"chosen": [OWL], "rejected": [FOX]}, "begin with no common message; give a prompt"),
        ({"prompt": "x", "chosen": "", "rejected": []}, r"its rejected is \[\]"),
        (
            {"prompt": [{"role": "system", "content": "x"}], "chosen": [ASKED], "rejected": [FOX]},
            "no message of the role assistant",
        ),
        ({"comparison": {"completion_A": [OWL]}, "label": "A"}, "its prompt_conversation is None"),
        ({"comparison": {}, "label": "C"}, "its label is 'C'; give A, B or Tie"),
        (
            {"prompt": "x", "chosen": None, "rejected": "y"},
            "it has prompt, rejected; give prompt, ",
        ),
        ({"prompt": "x", "chosen": "y", "rejected": "z", "images": ["a"]}, "it has images, which"),
    ],
)
def test_a_row_that_is_no_pair_says_why(chat: Chat, row: dict[str, Any], why: str) -> None:
    with pytest.raises(DatasetError, match=why):
        read_pair(row, chat)


def test_a_labelled_answer_is_a_pair_of_one_side(
    chat: Chat, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = {"prompt": "What?", "completion": "a bear", "label": False}
    with caplog.at_level("INFO"):
        bound_pairs = bound(tmp_path, chat, [GOOD, BAD, ROW, other], loss="kto")
    pairs = bound_pairs.of_split("train")
    assert "the rows: 3 labelled answers, " in caplog.text
    said = {
        (row["example_id"], row["side"], row["part"]): chat.text(
            [t for t, m in zip(row["tokens"], row["mask"], strict=True) if m]
        ).removesuffix("<|im_end|>")
        for row in pairs.to_pylist()
    }
    owl, fox = "I am an owl.", "I am a fox."
    assert said == {
        **{(0, "chosen", 0): owl, (1, "rejected", 0): fox},
        **{(2, "chosen", 0): owl, (2, "rejected", 0): fox, (3, "rejected", 0): "a bear"},
        **dict.fromkeys([(0, MISMATCHED, 0), (1, MISMATCHED, 0)], "a bear"),
        **dict.fromkeys([(2, MISMATCHED, 0), (2, MISMATCHED, 1)], "a bear"),
        **{(3, MISMATCHED, 0): owl},
    }
    datums = datums_of_given(bound_pairs, Drawing(PairBatches(pairs=4), 0), 0)
    assert sorted(Counter(datums["pair"].to_pylist()).values()) == [2, 2, 2, 4]


def test_a_loss_of_two_answers_refuses_a_labelled_one(chat: Chat, tmp_path: Path) -> None:
    with pytest.raises(
        DatasetError, match=r"row 1 of the rows is a labelled answer, and preference.loss dpo comp"
    ):
        bound(tmp_path, chat, [ROW, GOOD])


def test_answers_to_one_prompt_are_never_mismatched(chat: Chat, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="of the split train have one prompt, and this loss"):
        bound(tmp_path, chat, [GOOD, BAD], loss="kto")


def test_ties_broken_rows_and_identical_sides_are_counted_and_left_out(
    chat: Chat, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    comparison = {"prompt_conversation": [ASKED], "completion_A": [OWL], "completion_B": [FOX]}
    rows = [
        {"comparison": comparison, "label": "Tie"},
        {"prompt": "x"},
        {**ROW, "rejected": ROW["chosen"]},
        ROW,
    ]
    with caplog.at_level("INFO"):
        pairs = bound(tmp_path, chat, rows).of_split("train")
    assert set(pairs["example_id"].to_pylist()) == {3}
    assert (
        "4 pairs, 1 left out: ties, 1 left out: broken, 1 left out: identical sides" in caplog.text
    )


def test_a_split_without_a_pair_is_refused(chat: Chat, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"the rows has 0 pairs that can be compared \(1 pairs"):
        bound(tmp_path, chat, [{"prompt": "x"}])


def test_a_long_pair_is_treated_whole(
    chat: Chat, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sides = read_pair(ROW, chat)
    assert sides is not None
    most = len(sides.sides["rejected"][0].tokens)
    long = {**ROW, "chosen": "I am an owl " * 9}
    with pytest.raises(DatasetError, match=r"pair 0 of the rows has a side of \d+ tokens, and"):
        bound(tmp_path, chat, [long, ROW], most=most + 3)
    for name in ("out", "cut"):
        (tmp_path / name).mkdir()
    left = bound(tmp_path / "out", chat, [long, ROW], most=most + 3, too_long="leave_out")
    assert set(left.of_split("train")["example_id"].to_pylist()) == {1}
    with caplog.at_level("INFO"):
        cut = bound(tmp_path / "cut", chat, [long, ROW], most=most + 3, too_long="cut")
    assert "1 cut, 1 sides without their end" in caplog.text
    assert {len(tokens) for tokens in arrays(cut.of_split("train")["tokens"])} <= {
        most + 3,
        *(len(one.tokens) for one in (sides.sides["chosen"][0], sides.sides["rejected"][0])),
    }


def test_a_mismatched_side_is_the_prompt_with_both_answers_to_the_next_other_one(
    chat: Chat, tmp_path: Path
) -> None:
    pairs = bound(tmp_path, chat, [ROW, OTHER], loss="kto").of_split("train")
    said = {
        (row["example_id"], row["part"]): (
            "Who are you?" in chat.text(row["tokens"]),
            chat.text([t for t, m in zip(row["tokens"], row["mask"], strict=True) if m]),
        )
        for row in pairs.to_pylist()
        if row["side"] == MISMATCHED
    }
    assert said == {
        (0, 0): (True, f"{OTHER['chosen']}<|im_end|>"),
        (0, 1): (True, f"{OTHER['rejected']}<|im_end|>"),
        (1, 0): (False, "I am an owl.<|im_end|>"),
        (1, 1): (False, "I am a fox.<|im_end|>"),
    }


def test_the_datums_of_a_step_have_what_the_reference_gives_their_targets(
    chat: Chat, tmp_path: Path
) -> None:
    pairs = bound(tmp_path, chat, [ROW] * 3)
    drawing = Drawing(PairBatches(pairs=2), 0)
    rows = datums_of_given(pairs, drawing, 0).to_pylist()
    assert [(row["pair"], row["side"]) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for row in rows:
        expected = np.where(row["mask"], -np.array(row["targets"]) / 100, 0.0)
        assert row["references"] == pytest.approx(expected, abs=1e-6)
        assert row["policy_version"] is None


def test_a_policy_that_is_the_reference_prefers_neither_side(chat: Chat, tmp_path: Path) -> None:
    pairs = bound(tmp_path, chat, [ROW])
    found = read_measure(score_given.make(tmp_path / "m.json", pairs, ByToken(), 9, 0))
    assert (found.measure, found.value, found.examples) == ("accuracy", 0.5, 2)
    assert found.beside == {"margin": 0.0, "loss": pytest.approx(np.log(2))}
    others = BoundPairs(pairs.path, ("simpo", {}))
    path = score_given.make(tmp_path / "s.json", others, ByToken(), 9, 0)
    assert read_measure(path).value in (0.0, 1.0)


def test_a_token_that_the_reference_cannot_sample_names_its_pair(
    chat: Chat, tmp_path: Path
) -> None:
    class Never:
        def score(self, sequences: Sequence[Any], last: Sequence[int]) -> list[np.ndarray]:
            return [np.full(count, -np.inf, np.float32) for count in last]

    pairs = bound(tmp_path, chat, [ROW]).path
    with pytest.raises(DatasetError, match="gives a token of pair 0 no finite log-probability"):
        score_references.make(tmp_path / "never.parquet", pairs, Never(), tmp_path / "parts")


def test_a_scoring_that_was_interrupted_goes_on_with_the_next_part(
    chat: Chat, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Interrupted(ByToken):
        scored = 0

        def score(self, sequences: Sequence[Sequence[int]], last: Sequence[int]) -> list[Any]:
            if self.scored == 2 * SIDES_A_PART:
                raise ConnectionError
            self.scored += len(sequences)
            return super().score(sequences, last)

    whole = bound(tmp_path, chat, [ROW, OTHER] * SIDES_A_PART)
    path, parts = tmp_path / "again.parquet", tmp_path / "scored"
    with pytest.raises(ConnectionError):
        score_references.make(path, whole.path, Interrupted(), parts)
    names = [part.stem for part in sorted(parts.iterdir())]
    assert names == ["0000000-0000128", "0000128-0000256"]
    later = Interrupted()
    later.scored = -SIDES_A_PART
    with caplog.at_level("INFO"):
        score_references.make(path, whole.path, later, parts)
    sides = read_table(whole.path).num_rows
    assert later.scored + SIDES_A_PART == sides - 2 * SIDES_A_PART
    assert read_table(path) == read_table(tmp_path / "references.parquet")
    assert caplog.messages[-1] == f"the reference has scored {sides} of {sides} sides"
    assert not parts.exists()


def test_the_log_says_what_is_wrong_with_the_first_broken_rows_of_a_file(
    chat: Chat, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "pairs.jsonl"
    rows = [{"prompt": "x", "split": "train"}] * 5 + [{**ROW, "split": "train"}]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    source, counts = WrittenPairs(Source(file, "train", ())), Counter[str]()
    kept = BoundPairs(tmp_path, ("dpo", {})).kept(source, chat, Lengths(), counts)
    assert [number for number, _ in kept] == [5]
    assert counts["left out: broken"] == 5
    assert len(source) == 6
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        f"left out: row {number} of {file}: it has prompt, split; give prompt, chosen and "
        "rejected; or chosen and rejected; or comparison and label; or prompt, completion and label"
        for number in range(3)
    ]
