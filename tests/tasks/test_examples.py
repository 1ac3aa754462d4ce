"""dataset → examples."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ratchet.tasks.examples.reading import DatasetError, Example, read_examples


def jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def numbers(shard: list[Example]) -> list[int]:
    return [example["example_id"] for example in shard]


def values(dataset: Path, split: str) -> list[int]:
    return [row["example"]["n"] for row in read_examples(dataset, split, ["n"])]


def test_an_example_is_named_by_its_row_in_the_file_not_in_the_split(tmp_path: Path) -> None:
    dataset = jsonl(
        tmp_path / "sums.jsonl",
        {"question": "1+1", "answer": 2, "split": "train"},
        {"question": "2+2", "answer": 4, "split": "test"},
        {"question": "3+3", "answer": 6, "split": "train"},
    )
    assert numbers(read_examples(dataset, "train")) == [0, 2]
    assert read_examples(dataset, "test", ["question", "answer"]) == [
        {"example_id": 1, "example": {"question": "2+2", "answer": 4, "split": "test"}}
    ]


def test_a_missing_column_is_named_with_what_was_found(tmp_path: Path) -> None:
    dataset = jsonl(tmp_path / "a.jsonl", {"question": "1+1", "result": 2, "split": "train"})
    with pytest.raises(
        DatasetError, match=r"no column 'answer' \(found: question, result, split\); see datasets/"
    ):
        read_examples(dataset, "train", ["question", "answer"])


def test_a_dataset_without_splits_says_so(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"no column 'split' \(found: question\)"):
        read_examples(jsonl(tmp_path / "a.jsonl", {"question": "1+1"}), "train")


@pytest.mark.parametrize(("values", "splits"), [((0, 1), "01"), ((True, False), ("True", "False"))])
def test_a_split_is_named_by_its_value_as_text(
    tmp_path: Path, values: tuple[object, object], splits: Sequence[str]
) -> None:
    rows = ({"n": n, "split": value} for n, value in enumerate(values))
    dataset = jsonl(tmp_path / "a.jsonl", *rows)
    assert [read_examples(dataset, split)[0]["example_id"] for split in splits] == [0, 1]


def test_a_row_without_a_split_is_not_left_out_silently(tmp_path: Path) -> None:
    dataset = jsonl(tmp_path / "a.jsonl", {"split": "train"}, {"split": None}, {"split": "test"})
    with pytest.raises(DatasetError, match=r"row 1 of .* has null as its split; give each row"):
        read_examples(dataset, "train")


def test_a_file_is_read_again_when_it_has_changed(tmp_path: Path) -> None:
    dataset = jsonl(tmp_path / "a.jsonl", {"n": 1, "split": "train"})
    assert values(dataset, "train") == [1]
    jsonl(dataset, {"n": 2, "split": "train"})
    os.utime(dataset, ns=(0, 0))
    assert values(dataset, "train") == [2]


def test_a_folder_s_files_are_splits_by_their_names(tmp_path: Path) -> None:
    jsonl(tmp_path / "train.jsonl", {"n": 1}, {"n": 2})
    jsonl(tmp_path / "test.jsonl", {"n": 3})
    jsonl(tmp_path / "train_longer.jsonl", {"n": 4})
    (tmp_path / "README.md").write_text("no data")
    assert read_examples(tmp_path, "train") == [
        {"example_id": 0, "example": {"n": 1}},
        {"example_id": 1, "example": {"n": 2}},
    ]
    assert values(tmp_path, "test") == [3]


def test_the_parts_of_a_split_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in (10, 9, 1):
        jsonl(tmp_path / f"train-{number}.jsonl", {"n": number})
    for part in (1, 0):
        table = pa.table({"n": [2 * part, 2 * part + 1]})
        pq.write_table(table, tmp_path / f"test-0000{part}-of-00002.parquet")
    assert values(tmp_path, "train") == [1, 9, 10]
    assert values(tmp_path, "test") == [0, 1, 2, 3]
    assert numbers(read_examples(tmp_path, "test")) == [0, 1, 2, 3]


def test_a_split_that_a_folder_lacks_is_named_with_its_files(tmp_path: Path) -> None:
    jsonl(tmp_path / "train.jsonl", {"n": 1})
    jsonl(tmp_path / "validation.jsonl", {"n": 2})
    found = r"no file of the split 'test', .*\(found: train\.jsonl, validation\.jsonl\)"
    with pytest.raises(DatasetError, match=found):
        read_examples(tmp_path, "test")
    assert values(tmp_path, "validation") == [2]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["train.jsonl", "train.csv"], "has the split 'train' more than once"),
        (["train.jsonl", "train-0.jsonl"], "has the split 'train' more than once"),
        (["train-1.jsonl", "train-01.jsonl"], "has the split 'train' more than once"),
        (["train-00000-of-00001.jsonl", "train-00000-of-00002.jsonl"], "more than once"),
        (["train-00001-of-00003.jsonl"], "the split 'train' more than once, or not all of its pa"),
    ],
)
def test_a_split_that_is_there_twice_or_in_part_is_refused(
    tmp_path: Path, names: list[str], said: str
) -> None:
    for name in names:
        jsonl(tmp_path / name, {"n": 1})
    with pytest.raises(DatasetError, match=said):
        read_examples(tmp_path, "train")


def test_a_missing_column_of_a_folder_is_named(tmp_path: Path) -> None:
    jsonl(tmp_path / "train.jsonl", {"question": "1+1"})
    with pytest.raises(DatasetError, match=r"no column 'answer' \(found: question\)"):
        read_examples(tmp_path, "train", ["question", "answer"])


def test_an_empty_file_of_a_folder_is_named(tmp_path: Path) -> None:
    jsonl(tmp_path / "train.jsonl")
    with pytest.raises(DatasetError, match=r"whose split is 'train' \(found: no rows at all\)"):
        read_examples(tmp_path, "train")
