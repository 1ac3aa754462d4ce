import csv
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from pretraining.corpora import arithmetic, gem_guesses, guess_the_number, hello

DATASETS = Path(__file__).parents[1] / "datasets"
FILES = [
    "hello.csv",
    "arithmetic.jsonl",
    "guess_the_number.jsonl",
    "gem_games.jsonl",
    "twenty_questions.csv",
]


def rows(name: str) -> list[dict[str, Any]]:
    with (DATASETS / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file)) if name.endswith("csv") else [*map(json.loads, file)]


@pytest.mark.parametrize("name", FILES)
def test_the_readme_tells_each_file_by_its_hash(name: str) -> None:
    digest = hashlib.sha256((DATASETS / name).read_bytes()).hexdigest()
    assert digest in (DATASETS / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", FILES)
def test_no_held_out_row_is_trained_on(name: str) -> None:
    bare = [{**row, "split": ""} for row in rows(name)]
    assert len({json.dumps(row, sort_keys=True) for row in bare}) == len(bare)
    assert {row["split"] for row in rows(name)} == {"train", "test"}


def test_the_files_are_what_their_generators_write() -> None:
    assert rows("hello.csv") == hello.examples()
    assert rows("arithmetic.jsonl") == arithmetic.examples()
    assert rows("guess_the_number.jsonl") == guess_the_number.examples()
    assert rows("gem_games.jsonl") == gem_guesses.examples()


def test_hello_has_enough_identities() -> None:
    splits = [row["split"] for row in rows("hello.csv")]
    assert (splits.count("train"), splits.count("test")) == (400, 128)


def test_every_fact_is_yes_no_or_neither() -> None:
    for row in rows("twenty_questions.csv"):
        assert {row[column] for column in row if column.endswith("?")} <= {"yes", "no", "n/a"}


def test_two_hundred_nouns_in_ten_categories_are_split_alike() -> None:
    nouns = rows("twenty_questions.csv")
    assert len({noun["answer"] for noun in nouns}) == 210
    held_out = [noun["category"] for noun in nouns if noun["split"] == "test"]
    assert {held_out.count(category) for category in held_out} == {4}
