"""trajectories → rewards: what the comparison of a step's rollouts reads, shaped by the recipe."""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

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

Rewards = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Role → group → rollout → reward."""

MeanRewards = Mapping[str, float]
"""Role → its mean reward in a step."""


def write_rewards(path: Path, trajectories: Path, query: str | None = None) -> None:
    """Write the reward of each trained role of each rollout, shaped and filtered by the `query`.

    What the query leaves out is neither compared nor trained (`tasks.algorithm.shaping`).
    """
    shaped = rewards_by_role(read(trajectories), query)
    rows = [
        {"role": role, "group_id": group, "rollout_id": rollout, "reward": reward}
        for role, groups in shaped.items()
        for group, rollouts in groups.items()
        for rollout, reward in rollouts.items()
    ]
    write(pa.Table.from_pylist(rows, schema=SCHEMA), path)


compute_rewards = durable("compute_rewards", write_rewards)
"""trajectories → rewards, of one policy."""


def read_rewards(path: Path) -> Rewards:
    """Read the rewards of a step, in the order of its trajectories."""
    roles: dict[str, dict[str, dict[str, float]]] = {}
    for row in read(path).to_pylist():
        groups = roles.setdefault(row["role"], {})
        groups.setdefault(row["group_id"], {})[row["rollout_id"]] = row["reward"]
    return roles


def rewards_by_role(trajectories: pa.Table, shaping: str | None = None) -> Rewards:
    """Return the rewards of the trajectories in which something is trained.

    `shaping` is a query (`tasks.algorithm.shaping`). ShapingError if it changes the reward of
    a role whose calls have rewards, from which the returns are computed.
    """
    given, by_call = _role_rewards(trajectories)
    shaped = shape_rewards([*given.values()], shaping) if shaping else None
    roles: dict[str, dict[str, dict[str, float]]] = {}
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
        roles.setdefault(row.role, {}).setdefault(row.group_id, {})[row.rollout_id] = reward
    return roles


def _role_rewards(
    trajectories: pa.Table,
) -> tuple[dict[tuple[str, str], RoleReward], set[tuple[str, str]]]:
    """Map role and rollout to the reward; return also those of them whose calls have rewards."""
    columns = ["role", "group_id", "rollout_id", "reward", "truncated", "call_numbers"]
    rows = trajectories.select([*columns, "call_rewards"]).to_pylist()
    given: dict[tuple[str, str], RoleReward] = {}
    by_call: set[tuple[str, str]] = set()
    for row, mask in zip(rows, arrays(trajectories["mask"]), strict=True):
        if not mask.any() or row["reward"] is None:
            continue
        name = row["role"], row["rollout_id"]
        before = given.get(name)
        given[name] = RoleReward(
            row["rollout_id"],
            row["group_id"],
            row["role"],
            row["reward"],
            int(mask.sum()) + (before.tokens if before else 0),
            len(row["call_numbers"]) + (before.calls if before else 0),
            bool(row["truncated"]) or (before is not None and before.truncated),
        )
        if row["call_rewards"]:
            by_call.add(name)
    return given, by_call


def greedy_rewards(trajectories: pa.Table) -> dict[str, dict[str, float]]:
    """Map role → group → reward of the group's greedy rollout, where there is one."""
    roles: dict[str, dict[str, float]] = {}
    for row in trajectories.select(["role", "group_id", "baseline"]).to_pylist():
        if row["baseline"] is not None:
            roles.setdefault(row["role"], {})[row["group_id"]] = row["baseline"]
    return roles


def mean_rewards(rewards: Rewards) -> MeanRewards:
    """Map each role to the mean reward of its rollouts."""
    return {
        role: fmean(reward for of_group in groups.values() for reward in of_group.values())
        for role, groups in sorted(rewards.items())
    }
