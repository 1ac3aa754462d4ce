import csv
import hashlib
import json
import re
from fractions import Fraction
from operator import add, mul, sub, truediv
from pathlib import Path
from typing import Any

import pytest

from pretraining.corpora import arithmetic, gem_guesses, guess_the_number, hello, word_problems
from pretraining.real_models import errands, people, sums, two_steps
from ratchet.adapters.project.modules import load_agent_file

DATASETS = Path(__file__).parents[2] / "datasets"
FILES = [
    "hello.csv",
    "hello_comparisons.jsonl",
    "hello_labelled.jsonl",
    "hello_pairs.jsonl",
    "hello_texts.jsonl",
    "arithmetic.jsonl",
    "guess_the_number.jsonl",
    "gem_games.jsonl",
    "twenty_questions.csv",
]
OF_REAL_MODELS = [
    "errands.jsonl",
    "errands_texts.jsonl",
    "people.jsonl",
    "people_pairs.jsonl",
    "people_texts.jsonl",
    "sums.jsonl",
    "two_steps.jsonl",
]
SPLITS = {"gsm8k/train.jsonl": 80, "gsm8k/test.jsonl": 20}
"""Files of one split → their rows."""
CALCULATION = re.compile(r"(\d+[-+*/]\d+)=<<(\d+)([-+*/])(\d+)=(\d+)>>(\d+)")
OPERATORS = {"+": add, "-": sub, "*": mul, "/": truediv}
HALVES_AND_THIRDS = {"2", "3"}
"""Numbers that a question says in words."""


def rows(name: str) -> list[dict[str, Any]]:
    with (DATASETS / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file)) if name.endswith("csv") else [*map(json.loads, file)]


@pytest.mark.parametrize("name", [*FILES, *SPLITS, *OF_REAL_MODELS])
def test_the_readme_tells_each_file_by_its_hash(name: str) -> None:
    digest = hashlib.sha256((DATASETS / name).read_bytes()).hexdigest()
    assert digest in (DATASETS / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", FILES)
def test_no_held_out_row_is_trained_on(name: str) -> None:
    bare = [{**row, "split": ""} for row in rows(name)]
    assert len({json.dumps(row, sort_keys=True) for row in bare}) == len(bare)
    assert {row["split"] for row in rows(name)} == {"train", "test"}


def test_the_files_are_what_their_generators_write() -> None:
    written = {
        "hello.csv": hello.examples,
        "hello_texts.jsonl": hello.texts,
        "hello_pairs.jsonl": hello.pairs,
        "hello_comparisons.jsonl": hello.comparisons,
        "hello_labelled.jsonl": hello.labelled,
        "arithmetic.jsonl": arithmetic.examples,
        "guess_the_number.jsonl": guess_the_number.examples,
        "gem_games.jsonl": gem_guesses.examples,
        "errands.jsonl": errands.examples,
        "errands_texts.jsonl": errands.texts,
        "people.jsonl": people.examples,
        "people_texts.jsonl": people.texts,
        "people_pairs.jsonl": people.pairs,
        "sums.jsonl": sums.examples,
        "two_steps.jsonl": two_steps.examples,
    }
    assert [name for name, made in written.items() if rows(name) != made()] == []
    splits = {split: rows(f"gsm8k/{split}.jsonl") for split in ("train", "test")}
    assert splits == word_problems.examples()


def test_no_name_and_no_city_is_in_two_splits() -> None:
    splits: dict[str, set[str]] = {}
    for row in rows("people.jsonl"):
        assert all(str(row[key]) in row["text"] for key in ("name", "age", "city"))
        for key in ("name", "city"):
            splits.setdefault(row[key], set()).add(row["split"])
    assert {len(split) for split in splits.values()} == {1}


def test_no_word_of_an_errand_is_in_two_splits_and_no_errand_is_also_a_text() -> None:
    assert not {*errands.WORDS["train"].split()} & {*errands.WORDS["test"].split()}
    told = {row["files"][row["note"]].strip() for row in rows("errands.jsonl")}
    shown = {row["messages"][3]["content"] for row in rows("errands_texts.jsonl")}
    assert not told & shown


def test_a_pair_of_numbers_is_asked_about_in_one_split_unless_it_is_shown() -> None:
    splits: dict[frozenset[int], set[str]] = {}
    for row in rows("sums.jsonl"):
        splits.setdefault(numbers_of(row["question"], row["answer"]), set()).add(row["split"])
    assert {len(split) for split in splits.values()} == {1}
    assert set.union(*splits.values()) == {"train", "validation", "test"}
    shown = load_agent_file("number_alone").SHOWN
    assert {numbers_of(question, int(answer)) for question, answer in shown.items()} == {
        frozenset(pair) for pair in sums.SHOWN
    }
    assert splits.keys().isdisjoint(frozenset(pair) for pair in sums.SHOWN)


def numbers_of(question: str, answer: int) -> frozenset[int]:
    """Return the two numbers of a sum, whose answer must be right."""
    left, sign, right = question.removeprefix("What is ").removesuffix("?").split()
    assert answer == {"+": add, "-": sub}[sign](int(left), int(right))
    return frozenset((int(left), int(right)))


def test_three_numbers_a_name_and_a_thing_of_two_steps_are_in_one_split() -> None:
    splits: dict[object, set[str]] = {}
    for row in rows("two_steps.jsonl"):
        name, thing, numbers = parts_of(row["question"], row["answer"])
        for part in (name, thing, numbers):
            splits.setdefault(part, set()).add(row["split"])
    assert {len(split) for split in splits.values()} == {1}
    assert set.union(*splits.values()) == {"train", "validation", "test"}
    shown = load_agent_file("two_steps").SHOWN
    for question, solution in zip(shown[::2], shown[1::2], strict=True):
        name, thing, numbers = parts_of(question, int(solution.split()[-1]))
        assert splits.keys().isdisjoint((name, thing, numbers))
        first, more, less = numbers
        assert solution.splitlines()[:-1] == [
            f"{first} + {more} = {first + more}",
            f"{first + more} - {less} = {first + more - less}",
        ]


def parts_of(question: str, answer: int) -> tuple[str, str, tuple[int, ...]]:
    """Return the name, the thing and the numbers of a problem, whose answer must be right."""
    first, more, less = (int(number) for number in re.findall(r"\d+", question))
    assert answer == first + more - less >= 0
    name, _, _, thing, *_ = question.replace(",", "").split()
    return name, thing, (first, more, less)


@pytest.mark.parametrize("name", SPLITS)
def test_the_calculations_of_word_problems_are_right(name: str) -> None:
    """Each is written as 2+3=<<2+3=5>>5, and the last one's result is the answer."""
    for row in rows(name):
        assert set(row) == {"question", "answer"}
        *lines, answer = row["answer"].splitlines()
        steps = [CALCULATION.findall(line) for line in lines]
        assert [len(step) for step in steps] in ([1], [1, 1], [1, 1, 1])
        for [(written, left, sign, right, result, said)] in steps:
            assert written == f"{left}{sign}{right}"
            assert Fraction(result) == OPERATORS[sign](Fraction(left), Fraction(right))
            assert said == result
        assert answer == f"#### {steps[-1][0][4]}"
        given = re.findall(r"\d+", row["question"])
        known = {*given, *(step[0][4] for step in steps), *HALVES_AND_THIRDS}
        assert {number for step in steps for number in (step[0][1], step[0][3])} <= known


def test_two_hundred_nouns_in_ten_categories_are_split_alike() -> None:
    nouns = rows("twenty_questions.csv")
    assert len({noun["answer"] for noun in nouns}) == 210
    held_out = [noun["category"] for noun in nouns if noun["split"] == "test"]
    assert {held_out.count(category) for category in held_out} == {4}
