"""trajectories → rewards: what the comparison of a step's rollouts reads, shaped by the recipe."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pyarrow as pa

from tasks.algorithm.shaping import RoleReward, ShapingError, shape_rewards
from tasks.storage.durability import durable
from tasks.storage.tables import arrays, read, write


class RewardRow(NamedTuple):
    """Reward of a trained role of a rollout, as the comparison reads it."""

    role: str
    group_id: str
    rollout_id: str
    reward: float


SCHEMA = pa.schema(
    [
        ("role", pa.string()),
        ("group_id", pa.string()),
        ("rollout_id", pa.string()),
        ("reward", pa.float64()),
    ]
)
"""Columns of a file of rewards: the fields of RewardRow."""

MeanRewards = Mapping[str, float]
"""Role → its mean reward in a step."""


def write_rewards(path: Path, trajectories: Path, query: str | None = None) -> None:
    """Write the reward of each trained role of each rollout, shaped and filtered by the `query`.

    What the query leaves out is neither compared nor trained (`tasks.algorithm.shaping`).
    """
    rows = [row._asdict() for row in rewards_of(read(trajectories), query)]
    write(pa.Table.from_pylist(rows, schema=SCHEMA), path)


compute_rewards = durable("compute_rewards", write_rewards)
"""trajectories → rewards, of one policy."""


def read_rewards(path: Path) -> list[RewardRow]:
    """Read the rewards of a step, by role and in the order of its trajectories."""
    return [RewardRow(**row) for row in read(path).to_pylist()]


def rewards_of(trajectories: pa.Table, shaping: str | None = None) -> list[RewardRow]:
    """Return the rewards of the trajectories in which something is trained, role by role.

    `shaping` is a query (`tasks.algorithm.shaping`). ShapingError if it changes the reward of
    a role whose calls have rewards, from which the returns are computed.
    """
    given, by_call = _role_rewards(trajectories)
    shaped = shape_rewards([*given.values()], shaping) if shaping else None
    roles: dict[str, list[RewardRow]] = defaultdict(list)
    for name, row in given.items():
        reward = row.reward if shaped is None else shaped.get(name)
        if reward is None:
            continue
        if name in by_call and reward != row.reward:
            raise ShapingError(
                f"algorithm.rewards changes the reward of {row.role} in {row.rollout_id}, whose "
                "calls have rewards of their own, so it would be ignored; let it only leave "
                "rollouts out, or let the agent reward whole rollouts"
            )
        roles[row.role].append(RewardRow(row.role, row.group_id, row.rollout_id, reward))
    return [row for rows in roles.values() for row in rows]


def _role_rewards(
    trajectories: pa.Table,
) -> tuple[dict[tuple[str, str], RoleReward], set[tuple[str, str]]]:
    """Map role and rollout to the reward; return also those of them whose calls have rewards."""
    columns = ["role", "group_id", "rollout_id", "reward", "truncated", "call_numbers"]
    rows = trajectories.select([*columns, "call_rewards"]).to_pylist()
    trained: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row, mask in zip(rows, arrays(trajectories["mask"]), strict=True):
        if mask.any() and row["reward"] is not None:
            trained[row["role"], row["rollout_id"]].append({**row, "tokens": int(mask.sum())})
    given = {
        (role, rollout): RoleReward(
            rollout,
            own[-1]["group_id"],
            role,
            own[-1]["reward"],
            sum(row["tokens"] for row in own),
            sum(len(row["call_numbers"]) for row in own),
            any(row["truncated"] for row in own),
        )
        for (role, rollout), own in trained.items()
    }
    return given, {name for name, own in trained.items() if any(row["call_rewards"] for row in own)}


def greedy_rewards(trajectories: pa.Table, role: str) -> dict[str, float]:
    """Map each group to the reward of a role in its greedy rollout, where there is one."""
    rows = trajectories.select(["role", "group_id", "baseline"]).to_pylist()
    return {
        row["group_id"]: row["baseline"]
        for row in rows
        if row["role"] == role and row["baseline"] is not None
    }


def mean_rewards(rewards: Sequence[RewardRow]) -> MeanRewards:
    """Map each role to the mean reward of its rollouts."""
    return {
        role: fmean(row.reward for row in rewards if row.role == role)
        for role in sorted({row.role for row in rewards})
    }
