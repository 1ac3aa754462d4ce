"""trajectories → rewards: what the comparison of a step's rollouts reads, shaped by the recipe."""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa

from tasks.algorithm.shaping import RoleReward, ShapingError, shape_rewards
from tasks.storage.durability import durable
from tasks.storage.tables import arrays, read, write

SCHEMA = pa.schema(
    [
        ("role", pa.string()),
        ("group_id", pa.string()),
        ("rollout_id", pa.string()),
        ("reward", pa.float64()),
    ]
)

MeanRewards = Mapping[str, float]
"""Role → its mean reward in a step."""

Verdicts = Mapping[str, float]
"""Rollout → the score that a judge gives it; none of those of which it says nothing."""


@durable
def compute_rewards(
    path: Path, trajectories: Path, query: str | None = None, verdicts: Path | None = None
) -> None:
    """Write the reward of each trained role of each rollout, shaped and filtered by the `query`.

    A judge's `verdicts` take the place of the agent's rewards; what it gives no score, or what the
    query leaves out, is neither compared nor trained (`tasks.algorithm.shaping`).
    """
    write(rewards_of(read(trajectories), query, read_verdicts(verdicts)), path)


def read_verdicts(path: Path | None) -> Verdicts | None:
    """Read the scores that a judge gave to rollouts of a step; None if there is no judge."""
    if path is None:
        return None
    rows = read(path, ["rollout_id", "verdict"]).to_pylist()
    return {row["rollout_id"]: row["verdict"] for row in rows if row["verdict"] is not None}


def rewards_of(
    trajectories: pa.Table, shaping: str | None = None, verdicts: Verdicts | None = None
) -> pa.Table:
    """Return the rewards of the trajectories in which something is trained, a row in SCHEMA each.

    The rows are in the order of the trajectories, role by role. The scores of a judge, if there is
    one, are those of all roles of their rollouts.

    `shaping` is a query (`tasks.algorithm.shaping`). ShapingError if it, or a judge, changes the
    reward of a role whose calls have rewards, from which the returns are computed.
    """
    given, by_call = _role_rewards(trajectories, verdicts)
    shaped = shape_rewards([*given.values()], shaping) if shaping else None
    roles: dict[str, list[dict[str, object]]] = defaultdict(list)
    for name, row in given.items():
        reward = row.reward if shaped is None else shaped.get(name)
        if reward is None:
            continue
        if name in by_call and (verdicts is not None or reward != row.reward):
            changed = "algorithm.rewards" if verdicts is None else "algorithm.judge"
            raise ShapingError(
                f"{changed} changes the reward of {row.role} in {row.rollout_id}, whose calls have "
                "rewards of their own, so it would be ignored; let it only leave rollouts out, or "
                "let the agent reward whole rollouts"
            )
        roles[row.role].append({**vars(row), "reward": reward})
    return pa.Table.from_pylist([row for rows in roles.values() for row in rows], schema=SCHEMA)


def _role_rewards(
    trajectories: pa.Table, verdicts: Verdicts | None
) -> tuple[dict[tuple[str, str], RoleReward], set[tuple[str, str]]]:
    """Map role and rollout to the reward; return also those of them whose calls have rewards."""
    columns = ["role", "group_id", "rollout_id", "reward", "truncated", "call_numbers"]
    rows = trajectories.select([*columns, "call_rewards"]).to_pylist()
    trained: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row, mask in zip(rows, arrays(trajectories["mask"]), strict=True):
        if verdicts is not None:
            row["reward"] = verdicts.get(row["rollout_id"])
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


def mean_rewards(rewards: pa.Table) -> MeanRewards:
    roles: dict[str, list[float]] = defaultdict(list)
    for row in rewards.to_pylist():
        roles[row["role"]].append(row["reward"])
    return {role: fmean(roles[role]) for role in sorted(roles)}
