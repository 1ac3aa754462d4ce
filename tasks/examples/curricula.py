"""examples → the order in which steps draw them, by the seed and by what the run has recorded."""

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Literal

from tasks.storage.files import read_rows, verified
from tasks.storage.tables import query_beside, select

QUERY = query_beside(__file__)

Order = Literal["shuffled", "sequential", "easy_to_hard", "pass_rate"]

_READ: dict[Path, list[tuple[int, float | None]]] = {}
"""Sealed batch, which never changes → the example and the reward of each of its rollouts."""

ExampleRewards = Mapping[int, Sequence[float]]
"""Example that was played → the rewards of its rollouts; a failed rollout has no reward."""


@dataclass(frozen=True)
class Curriculum:
    """Order in which the examples of a dataset are drawn.

    All orders but `pass_rate` make passes; a pass draws every example once:
    `shuffled` anew for each pass, `sequential` as in the file, and `easy_to_hard` by the column
    `difficulty`, ascending, with ties in the shuffled order of the pass. `pass_rate` ranks the
    examples for each step by their rewards (`rank_by_reward`): `measured` are the sealed batches
    that count, and `under_way` the shards that were drawn after them.
    """

    order: Order = "shuffled"
    difficulty: str | None = None
    target: float = 0.5
    measured: tuple[Path, ...] = ()
    under_way: tuple[Path, ...] = ()

    def order_pass(self, difficulties: Sequence[float], seed: int, turn: int) -> Sequence[int]:
        """Return the order of pass `turn` over examples of these difficulties."""
        if self.order == "sequential":
            return range(len(difficulties))
        shuffled = shuffle_pass(len(difficulties), seed, turn)
        if self.order == "easy_to_hard":
            return sorted(shuffled, key=lambda place: difficulties[place])
        return shuffled

    def rank(self, examples: Sequence[int], seed: int) -> list[int]:
        """Rank the ids of examples for one step, by what was measured."""
        rewards = read_example_rewards(self.measured)
        drawn = {row["example_id"] for path in self.under_way for row in read_rows(path)}
        shuffled = [examples[place] for place in shuffle_pass(len(examples), seed, 0)]
        return rank_by_reward(shuffled, rewards, drawn, self.target)


@lru_cache(maxsize=16)
def shuffle_pass(count: int, seed: int | str, turn: int) -> tuple[int, ...]:
    """Return the shuffled order of pass `turn` over `count` examples, by a keyed hash."""

    def key(place: int) -> bytes:
        return sha256(f"{seed}/{turn}/{place}".encode()).digest()

    return tuple(sorted(range(count), key=key))


def rank_by_reward(
    examples: Sequence[int], rewards: ExampleRewards, under_way: Set[int], target: float
) -> list[int]:
    """Rank examples: the untried first, then by how near their mean reward is to the target.

    Equally near examples are ordered by their rewarded rollouts, the fewest first, and then as in
    `examples`. Examples that are under way, and examples whose rollouts have all failed, come last,
    since nothing says how near they are. With rewards of 0 and 1 and the target 0.5, the
    examples after the untried are in order of the variance of their rewards, the largest first
    (arXiv:2502.12272).
    """

    def key(example: int) -> tuple[int, float, int]:
        if example in under_way or rewards.get(example) == []:
            return 2, 0.0, 0
        if example not in rewards:
            return 0, 0.0, 0
        return 1, abs(fmean(rewards[example]) - target), len(rewards[example])

    return sorted(examples, key=key)


def read_example_rewards(batches: Sequence[Path]) -> ExampleRewards:
    """Read the rewards of each example that sealed batches have played.

    One query reads the batches that were not read before, since a step asks for all older batches.
    """
    if new := [verified(batch) for batch in batches if batch not in _READ]:
        read: dict[Path, list[tuple[int, float | None]]] = {batch: [] for batch in new}
        given = {str(path.absolute()): path for path in new}
        for row in select(QUERY, spans=new).to_pylist():
            read[given[row["batch"]]].append((row["example_id"], row["reward"]))
        _READ.update(read)
    rewards: dict[int, list[float]] = defaultdict(list)
    for batch in batches:
        for example, reward in _READ[batch]:
            rewards[example] += [] if reward is None else [reward]
    return rewards
