"""Pairs as texts that say which of two answers is better."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from ratchet.adapters.rendering.chat import Chat
from ratchet.engine.model.base_models import find
from ratchet.flows.recipe.given_recipes import TextDataset
from ratchet.tasks.examples.reading import DatasetError, Source
from ratchet.tasks.given.given import Unit
from ratchet.tasks.given.pairs import ComparedPairs

PAIR = {"prompt": "Who?", "chosen": "A cat.", "rejected": "No.", "split": "train"}
SIDES = {
    "prompt_conversation": [{"role": "user", "content": "Who?"}],
    "completion_A": [{"role": "assistant", "content": "No."}],
    "completion_B": [{"role": "assistant", "content": "A cat."}],
}


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(AutoTokenizer.from_pretrained(find("local/tiny-chat").folder))


def told(tmp_path: Path, chat: Chat, *rows: dict[str, Any]) -> list[tuple[int, list[Any]]]:
    """Return the whole text and the trained text of the sequences of each row."""
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = ComparedPairs(Source(file, "train", ()), "Which is better?")
    found = []
    for number, unit in pairs.units(chat):
        if isinstance(unit, DatasetError):
            raise unit
        assert isinstance(unit, Unit)
        said = [(chat.text(one.tokens), chat.text(one.trained())) for one in unit.sequences()]
        found.append((number, said))
    return found


def test_a_pair_is_compared_in_both_orders_and_the_verdict_is_trained(
    tmp_path: Path, chat: Chat
) -> None:
    [(_, [there, back])] = told(tmp_path, chat, PAIR)
    shown = r"(\w+) user: Who\?\n\1 A: A cat\.\n\1 B: No\.\n\1 .* Answer A, B or Tie\."
    assert re.search(shown, there[0])
    assert re.search(r"(\w+) A: No\.\n\1 B: A cat\.\n", back[0])
    assert [there[1].strip()[0], back[1].strip()[0]] == ["A", "B"]
    assert len(there[1]) < 20, "what is asked is not trained"


def test_a_comparison_is_read_by_its_label_and_a_tie_makes_no_text(
    tmp_path: Path, chat: Chat
) -> None:
    labelled = [{"comparison": SIDES, "label": label, "split": "train"} for label in ("B", "Tie")]
    [(_, better), (_, tie)] = told(tmp_path, chat, *labelled)
    [(_, expected)] = told(tmp_path, chat, PAIR)
    assert better == expected
    assert tie == []


def test_a_row_that_is_no_pair_is_named(tmp_path: Path, chat: Chat) -> None:
    with pytest.raises(DatasetError, match=r"row 1 of .*pairs.jsonl: .*give prompt, chosen"):
        told(tmp_path, chat, PAIR, {"prompt": "Who?", "split": "train"})


@pytest.mark.parametrize("other", [{"trained": "all"}, {"query": "select 1", "path": None}])
def test_comparisons_of_what_is_no_file_of_pairs_are_refused(other: dict[str, Any]) -> None:
    runs = {"runs": ("run",), "held_out": "select 2"} if "query" in other else {}
    values = {"path": "pairs.jsonl", "compares": "Which?", **other, **runs}
    with pytest.raises(ValueError, match=r"dataset.compares reads pairs of files"):
        TextDataset.model_validate(values)
