"""Names of shards, batches and rollouts: what is written is read back, in Python and in SQL."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.tasks.storage.names import (
    BatchName,
    RolloutName,
    batch_name,
    parse_batch,
    parse_rollout,
    rollout_name,
    shard_name,
)
from ratchet.tasks.storage.tables import select

SPLITS = st.from_regex(r"[a-z]+(\\.[0-9a-f]{6})?(-[a-z]+)?", fullmatch=True)
NUMBERS = st.integers(0, 10**6)


@given(SPLITS, NUMBERS, NUMBERS, NUMBERS)
def test_a_name_is_read_as_it_was_written(split: str, step: int, place: int, index: int) -> None:
    shard = shard_name(split, step)
    assert parse_batch(batch_name(shard, index)) == BatchName(shard, split, step, index)
    rollout = rollout_name(shard, place, index)
    named = parse_rollout(rollout)
    assert named == RolloutName(rollout.rpartition("-")[0], shard, split, step)


@pytest.mark.parametrize("split", ["train", "test", "test.0a1b2c", "greedy"])
def test_queries_read_the_same_parts(split: str) -> None:
    group = parse_rollout(rollout_name(shard_name(split, 3), 12, 1)).group
    query = "select split_of($group), place_of($group)"
    [row] = select(query, group=group).to_pylist()
    assert [*row.values()] == [split, 12]


@pytest.mark.parametrize("name", ["", "train", "train-3.1", "train-00003", "train-00003-12-1"])
def test_what_names_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"does not name a batch; <split>-<step>.<number> does"):
        parse_batch(name)
    with pytest.raises(ValueError, match="does not name a rollout"):
        parse_rollout(name)
