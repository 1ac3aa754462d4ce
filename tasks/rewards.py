"""trajectories → rewards: what each role of a rollout has earned.

The rewards of a step are the agent's or a judge's, shaped by the recipe.
"""

from collections import defaultdict
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa

from ratchet.tasks.algorithm.shaping import RoleReward, ShapingError, shape_rewards
from ratchet.tasks.storage.durability import durable
from ratchet.tasks.storage.tables import arrays, read_table, write_table
from ratchet.tasks.trajectories import TOKEN_LISTS

REWARD_SCHEMA = pa.schema(
    [
        ("role", pa.string()),
        ("group_id", pa.string()),
        ("rollout_id", pa.string()),
        ("reward", pa.float64()),
    ]
)

Verdicts = Mapping[str, float]
"""Rollout → the score that a judge gives it; rollouts without a score are left out."""


@durable
def compute_rewards(
    path: Path, trajectories: Path, query: str | None = None, verdicts: Path | None = None
) -> None:
    """Write the reward of each trained role of each rollout, shaped and filtered by the `query`.

    A judge's `verdicts` take the place of the agent's rewards; a rollout without a score, or one
    that the query leaves out, is neither compared nor trained (`tasks.algorithm.shaping`).
    """
    write_table(rewards_of(read_table(trajectories), query, read_verdicts(verdicts)), path)


def read_verdicts(path: Path | None) -> Verdicts | None:
    """Read the scores that a judge gave to rollouts of a step; None if there is no judge."""
    if path is None:
        return None
    rows = read_table(path, ["rollout_id", "verdict"]).to_pylist()
    return {row["rollout_id"]: row["verdict"] for row in rows if row["verdict"] is not None}


def rewards_of(
    trajectories: pa.Table, shaping: str | None = None, verdicts: Verdicts | None = None
) -> pa.Table:
    """Return a row in REWARD_SCHEMA for each trajectory in which something is trained.

    The rows are in the order of the trajectories, role by role. The score of a judge, if there
    is one, is the reward of every role of its rollout.

    `shaping` is a query (`tasks.algorithm.shaping`). ShapingError if it, or a judge, changes the
    reward of a role whose calls have rewards: the returns are computed from these rewards.
    """
    rows = trajectories.drop_columns([*TOKEN_LISTS]).to_pylist()
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
    shaped = shape_rewards([*given.values()], shaping) if shaping else None
    roles: dict[str, list[dict[str, object]]] = defaultdict(list)
    for name, row in given.items():
        reward = row.reward if shaped is None else shaped.get(name)
        if reward is None:
            continue
        changes = verdicts is not None or reward != row.reward
        if changes and any(one["call_rewards"] for one in trained[name]):
            changed = "algorithm.rewards" if verdicts is None else "algorithm.judge"
            raise ShapingError(
                f"{changed} changes the reward of {row.role} in {row.rollout_id}, whose calls have "
                "rewards of their own, so it would be ignored; let it only leave rollouts out, or "
                "let the agent reward whole rollouts"
            )
        roles[row.role].append({**vars(row), "reward": reward})
    return pa.Table.from_pylist([*chain(*roles.values())], schema=REWARD_SCHEMA)
