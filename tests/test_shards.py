"""dataset → shards."""

import json
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.examples.curricula import shuffle_pass
from tasks.examples.reading import DatasetError, Example, Source, read_examples
from tasks.shards import ShardSize, choose, draw_shard, read_shard, write_shard


def jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def numbered(count: int) -> list[Example]:
    return [{"example_id": number, "example": {"n": number}} for number in range(count)]


def numbers(shard: list[Example]) -> list[int]:
    return [example["example_id"] for example in shard]


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


def test_csv_values_stay_the_strings_they_are(tmp_path: Path) -> None:
    dataset = tmp_path / "hello.csv"
    dataset.write_text('task,note,split\n007,"yes, ""sir""",train\n,2024-01-01,train\n')
    assert [row["example"] for row in read_examples(dataset, "train")] == [
        {"task": "007", "note": 'yes, "sir"', "split": "train"},
        {"task": None, "note": "2024-01-01", "split": "train"},
    ]


def test_jsonl_values_keep_their_types_and_nesting(tmp_path: Path) -> None:
    row = {"when": "2024-01-01", "x": 1.5, "tags": ["é", None], "split": "train"}
    assert read_examples(jsonl(tmp_path / "a.jsonl", row), "train")[0]["example"] == row


def test_parquet_is_a_dataset_too(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"n": [1, 2], "l": [[1], []], "split": ["train", "test"]}), path)
    assert read_examples(path, "test", ["n"]) == [
        {"example_id": 1, "example": {"n": 2, "l": [], "split": "test"}}
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


def test_an_empty_split_is_named_with_the_splits_there_are(tmp_path: Path) -> None:
    dataset = jsonl(tmp_path / "a.jsonl", {"split": "train"}, {"split": "dev"})
    with pytest.raises(DatasetError, match=r"whose split is 'test' \(found: dev, train\)"):
        read_examples(dataset, "test")


def test_a_file_that_is_missing_or_of_another_kind_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"nowhere\.csv does not exist"):
        read_examples(tmp_path / "nowhere.csv", "train")
    with pytest.raises(DatasetError, match=r"a\.xlsx is not .*: give a \.csv, \.jsonl, \.parquet"):
        read_examples(tmp_path / "a.xlsx", "train")
    with pytest.raises(DatasetError, match=r"a row that is no JSON object: \[1\]"):
        read_examples(jsonl(tmp_path / "list.jsonl", [1]), "train")
    (tmp_path / "torn.jsonl").write_text('{"split": "train"}\n{"split":')
    with pytest.raises(DatasetError, match=r"torn\.jsonl cannot be read: .*Malformed JSON"):
        read_examples(tmp_path / "torn.jsonl", "train")


def test_a_source_is_a_split_with_the_columns_that_are_read_of_it(tmp_path: Path) -> None:
    dataset = jsonl(tmp_path / "a.jsonl", {"n": 1, "split": "train"}, {"n": 2, "split": "test"})
    assert numbers(Source(dataset, "test", ("n",)).examples()) == [1]


def test_five_examples_in_shards_of_two_wrap_without_dropping_any() -> None:
    steps = [numbers(choose(numbered(5), seed=0, step=step, size=2)) for step in range(5)]
    assert Counter(place for step in steps for place in step) == dict.fromkeys(range(5), 2)
    assert sorted((steps[0] + steps[1] + steps[2])[:5]) == [0, 1, 2, 3, 4]


@given(st.integers(1, 20), st.integers(0, 3), st.integers(1, 9), st.integers(0, 9))
def test_any_step_is_the_same_slice_of_one_endless_series(
    count: int, seed: int, size: int, step: int
) -> None:
    passes = [shuffle_pass(count, seed, turn) for turn in range(100 // count + 1)]
    series = [place for order in passes for place in order]
    shard = numbers(choose(numbered(count), seed, step, size))
    assert shard == series[step * size : (step + 1) * size]
    assert all(sorted(order) == list(range(count)) for order in passes)


def test_passes_and_seeds_shuffle_differently() -> None:
    assert len({shuffle_pass(30, 0, 0), shuffle_pass(30, 0, 1), shuffle_pass(30, 1, 0)}) == 3


def test_the_order_never_changes_between_versions() -> None:
    assert shuffle_pass(6, 0, 0) == (4, 2, 0, 5, 1, 3)


def test_a_shard_without_examples_is_refused() -> None:
    with pytest.raises(ValueError, match="got size 0, step 0"):
        choose(numbered(3), seed=0, step=0, size=0)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    rows = [{"n": number, "split": "train"} for number in range(7)]
    dataset = jsonl(tmp_path_factory.mktemp("dataset") / "n.jsonl", *rows)
    return Source(dataset, "train", ("n",))


def batches(path: Path) -> list[int]:
    return [row["batch"] for row in read_shard(path)]


def test_a_shard_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    row = {"text": "a\u2028b\nc\x85", "x": 0.1, "split": "train"}
    source = Source(jsonl(tmp_path / "one.jsonl", row), "train", ())
    path = tmp_path / "shards" / "train-00003.jsonl"
    write_shard(path, source, seed=0, step=3, size=ShardSize(1))
    assert read_shard(path) == [{"example_id": 0, "example": row, "batch": 0, "round": 0}]
    assert json.loads(path.read_text().removesuffix("\n"))["example_id"] == 0


@settings(max_examples=50, deadline=None)
@given(step=st.integers(0, 3), size=st.integers(1, 12), count=st.integers(1, 15))
def test_a_shard_is_split_into_contiguous_batches_of_nearly_one_size(
    tmp_path_factory: pytest.TempPathFactory, source: Source, step: int, size: int, count: int
) -> None:
    path = tmp_path_factory.mktemp("shard") / "train.jsonl"
    write_shard(path, source, 5, step, ShardSize(size, count))
    numbers = batches(path)
    assert numbers == sorted(numbers)
    assert set(numbers) == set(range(min(count, size))), "every batch has an example"
    sizes = Counter(numbers).values()
    assert max(sizes) - min(sizes) <= 1


def test_the_number_of_batches_changes_no_example(tmp_path: Path, source: Source) -> None:
    shards = []
    for count in (1, 2, 20):
        path = tmp_path / f"{count}.jsonl"
        write_shard(path, source, 0, 1, ShardSize(5, count))
        shards.append([{**row, "batch": 0} for row in read_shard(path)])
    assert shards[0] == shards[1] == shards[2]


def test_each_round_of_a_shard_has_batches_of_its_own(tmp_path: Path, source: Source) -> None:
    path = tmp_path / "train.jsonl"
    write_shard(path, source, 0, 1, ShardSize(3, 2, rounds=2))
    rows = read_shard(path)
    assert [(row["round"], row["batch"]) for row in rows] == [
        (0, 0), (0, 0), (0, 1), (1, 2), (1, 2), (1, 3),
    ]  # fmt: skip


@pytest.mark.usefixtures("prefect_server")
def test_a_drawn_shard_keeps_its_batches_when_their_number_changes(
    tmp_path: Path, source: Source
) -> None:
    path = tmp_path / "shards" / "train-00000.jsonl"
    draw_shard(path, source, 0, 0, ShardSize(6, 3))
    drawn = path.read_bytes()
    assert batches(path) == [0, 0, 1, 1, 2, 2]
    assert draw_shard(path, source, 0, 0, ShardSize(6, 2)) == path
    assert path.read_bytes() == drawn
