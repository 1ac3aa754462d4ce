"""Names of shards, batches, groups and rollouts, and which of its rollouts a batch plays.

The names are written and read here alone.

A shard is `<split>-<step>`, its batch `<shard>.<number>`, a group of its rollouts
`<shard>-<example>`, and a rollout `<group>-<k>`: train-00003, train-00003.1, train-00003-0012 and
train-00003-0012-01. `prelude.sql` has what queries read of them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from ratchet.tasks.storage.files import JsonRow, read_rows

JUDGE = "judge"
"""Split of the rollouts of a judge, whose examples are the groups of a training step."""

EXAMINER = "examiner"
"""Split of the rollouts of a judge of evaluations, whose examples are held-out rollouts."""

HELD_OUT_SPLITS = ("test", "greedy")
"""Splits of held-out rollouts: sampled as in training, and greedily."""

SHARD = r"(?P<shard>(?P<split>.+)-(?P<step>\d{5,}))"
BATCH = re.compile(rf"{SHARD}\.(?P<number>\d+)")
ROLLOUT = re.compile(rf"(?P<group>{SHARD}-\d{{4,}})-\d{{2,}}")


@dataclass(frozen=True)
class BatchName:
    """Parts of a batch's name."""

    shard: str
    split: str
    step: int
    number: int


@dataclass(frozen=True)
class RolloutName:
    """Parts of a rollout's name; `group` is the name of its group."""

    group: str
    shard: str
    split: str
    step: int


def is_judging(split: str) -> bool:
    """Return whether the rollouts of a split are a judge's."""
    return split.partition(".")[0] in (JUDGE, EXAMINER)


def shard_name(split: str, step: int) -> str:
    """Name the shard of a split at a step: `train-00003`."""
    return f"{split}-{step:05d}"


def batch_name(shard: str, number: int) -> str:
    """Name a rollout batch of a shard: `train-00003.1`."""
    return f"{shard}.{number}"


def group_name(shard: str, example: int) -> str:
    """Name a group, by the index of its example in the shard: `train-00003-0012`."""
    return f"{shard}-{example:04d}"


def rollout_name(shard: str, example: int, index: int) -> str:
    """Name a rollout, by the index of its example in the shard: `train-00003-0012-01`."""
    return f"{group_name(shard, example)}-{index:02d}"


def parse_batch(name: str) -> BatchName:
    """Read the name of a batch; ValueError if it is no such name."""
    found = _match(BATCH, name, "a batch; <split>-<step>.<number> does, such as train-00003.1")
    return BatchName(found["shard"], found["split"], int(found["step"]), int(found["number"]))


def parse_rollout(name: str) -> RolloutName:
    """Read the name of a rollout; ValueError if it is no such name."""
    form = "a rollout; <split>-<step>-<example>-<k> does, such as train-00003-0012-01"
    found = _match(ROLLOUT, name, form)
    return RolloutName(found["group"], found["shard"], found["split"], int(found["step"]))


def _match(pattern: re.Pattern[str], name: str, form: str) -> re.Match[str]:
    if (found := pattern.fullmatch(name)) is None:
        raise ValueError(f"{name!r} does not name {form}")
    return found


@dataclass(frozen=True)
class ShardBatch:
    """Part of a shard that one task plays, each example `group_size` times.

    A rollout that fails is played again until it has been played `attempts` times. One that ends by
    an error of the names `rewarded` has that reward, and has not failed.
    """

    shard: str
    number: int
    group_size: int
    attempts: int = 1
    rewarded: Mapping[str, float] = field(default_factory=dict[str, float])

    @classmethod
    def of_round(cls, shard: Path, number: int, *played: Any) -> list[Self]:
        """List the batches of round `number` of a shard, which are `played` alike."""
        numbers = sorted({row["batch"] for row in read_rows(shard) if row["round"] == number})
        return [cls(shard.stem, batch, *played) for batch in numbers]

    @property
    def name(self) -> str:
        return batch_name(self.shard, self.number)

    def examples(self, shard: Path) -> list[tuple[str, JsonRow]]:
        """Return (rollout id, example) of every rollout of the batch."""
        return [
            (rollout_name(self.shard, example, index), row)
            for example, row in enumerate(read_rows(shard))
            if row["batch"] == self.number
            for index in range(self.group_size)
        ]
