"""examples → shards."""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.tasks.examples.reading import Example, Source
from ratchet.tasks.examples.shards import (
    ShardSize,
    choose_examples,
    draw_shard,
    read_shard,
    shuffle_pass,
)


def jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def numbered(count: int) -> list[Example]:
    return [{"example_id": number, "example": {"n": number}} for number in range(count)]


def numbers(shard: list[Example]) -> list[int]:
    return [example["example_id"] for example in shard]


def test_five_examples_in_shards_of_two_wrap_without_dropping_any() -> None:
    steps = [numbers(choose_examples(numbered(5), seed=0, step=step, size=2)) for step in range(5)]
    assert Counter(place for step in steps for place in step) == dict.fromkeys(range(5), 2)
    assert sorted((steps[0] + steps[1] + steps[2])[:5]) == [0, 1, 2, 3, 4]


@given(st.integers(1, 20), st.integers(0, 3), st.integers(1, 9), st.integers(0, 9))
def test_any_step_is_the_same_slice_of_one_endless_series(
    count: int, seed: int, size: int, step: int
) -> None:
    passes = [shuffle_pass(count, seed, turn) for turn in range(100 // count + 1)]
    series = [place for order in passes for place in order]
    shard = numbers(choose_examples(numbered(count), seed, step, size))
    assert shard == series[step * size : (step + 1) * size]
    assert all(sorted(order) == list(range(count)) for order in passes)


def test_passes_and_seeds_shuffle_differently() -> None:
    assert len({shuffle_pass(30, 0, 0), shuffle_pass(30, 0, 1), shuffle_pass(30, 1, 0)}) == 3


def test_the_order_never_changes_between_versions() -> None:
    assert shuffle_pass(6, 0, 0) == (4, 2, 0, 5, 1, 3)


def test_a_sequential_order_is_that_of_the_file_pass_after_pass() -> None:
    steps = [choose_examples(numbered(3), 0, step, 1, "sequential") for step in range(7)]
    assert [numbers(step) for step in steps] == [[0], [1], [2], [0], [1], [2], [0]]


def test_a_shard_without_examples_is_refused() -> None:
    with pytest.raises(ValueError, match="got size 0, step 0"):
        choose_examples(numbered(3), seed=0, step=0, size=0)


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
    draw_shard.make(path, source, seed=0, step=3, size=ShardSize(1))
    assert read_shard(path) == [{"example_id": 0, "example": row, "batch": 0, "round": 0}]
    assert json.loads(path.read_text().removesuffix("\n"))["example_id"] == 0


@given(step=st.integers(0, 3), size=st.integers(1, 12), count=st.integers(1, 15))
def test_a_shard_is_split_into_contiguous_batches_of_nearly_one_size(
    tmp_path_factory: pytest.TempPathFactory, source: Source, step: int, size: int, count: int
) -> None:
    path = tmp_path_factory.mktemp("shard") / "train.jsonl"
    draw_shard.make(path, source, 5, step, ShardSize(size, count))
    numbers = batches(path)
    assert numbers == sorted(numbers)
    assert set(numbers) == set(range(min(count, size))), "every batch has an example"
    sizes = Counter(numbers).values()
    assert max(sizes) - min(sizes) <= 1


def test_the_number_of_batches_changes_no_example(tmp_path: Path, source: Source) -> None:
    shards = []
    for count in (1, 2, 20):
        path = tmp_path / f"{count}.jsonl"
        draw_shard.make(path, source, 0, 1, ShardSize(5, count))
        shards.append([{**row, "batch": 0} for row in read_shard(path)])
    assert shards[0] == shards[1] == shards[2]


def test_each_round_of_a_shard_has_batches_of_its_own(tmp_path: Path, source: Source) -> None:
    path = tmp_path / "train.jsonl"
    draw_shard.make(path, source, 0, 1, ShardSize(3, 2, rounds=2))
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
