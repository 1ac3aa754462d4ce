"""spans → trajectories: sequences of calls whose tokens only grew, with their reward."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import pyarrow as pa

from adapters.calls import POLICY
from tasks.algorithm.shaping import RoleReward, shape_rewards
from tasks.storage.checksums import verified
from tasks.storage.durability import durable
from tasks.storage.tables import arrays, query_beside, select, write

QUERY = query_beside(__file__)
TRAINED_ROLES = (POLICY,)
MeanRewards = Mapping[str, float]
"""Role → its mean reward in a step."""

LISTS = ("tokens", "logprobs", "mask")


def assemble(spans: Sequence[Path], trained_roles: Sequence[str] = TRAINED_ROLES) -> pa.Table:
    """Assemble the trajectories of a step from its batches, sorted by rollout, role and first call.

    `tokens`, `logprobs` and `mask` are aligned: the mask is 1 exactly where a token was sampled by
    one of `trained_roles`, and the log-probability of a token nobody sampled is 0. Rollouts without
    a reward and superseded attempts do not appear. `call_numbers`, `call_tokens` (how many of the
    tokens a call added) and `call_rewards` (null if its role has none) are aligned too.

    `reward` is the reward of the trajectory's role if the agent rewards roles, null if it rewards
    other roles only, and the rollout's reward otherwise; `baseline` is that of the group's greedy
    rollout, null if there is none. `truncated` is whether an answer ended at
    its limit of tokens. Calls that no policy answered have no tokens.

    `begins` says why a trajectory does not continue an earlier call: it is `new` (a conversation
    without history), or a prefix broke. Then it is the door's reason (`adapters.door.prefixes`), a
    `branch` (another call has already grown from the same one), or a `mismatch`: the door reported
    the tokens as kept, and they differ.
    """
    files = [verified(path) for path in spans]
    table = select(QUERY, spans=files, trained=list(trained_roles))
    _check_aligned(table)
    return table


def write_trajectories(
    path: Path, spans: Sequence[Path], trained_roles: Sequence[str] = TRAINED_ROLES
) -> None:
    """Write the trajectories of a step's batches."""
    write(assemble(spans, trained_roles), path)


assemble_trajectories = durable("assemble_trajectories", write_trajectories)
"""spans → trajectories, of one policy."""


def rewards_by_role(
    trajectories: pa.Table, shaping: str | None = None
) -> dict[str, dict[str, dict[str, float]]]:
    """Map role → group → rollout → reward, of the trajectories in which something is trained.

    `shaping` is a query (`tasks.algorithm.shaping`). ValueError if it changes the reward of a role
    whose calls have rewards, from which the returns are computed.
    """
    given, by_call = _role_rewards(trajectories)
    shaped = shape_rewards([*given.values()], shaping) if shaping else None
    roles: dict[str, dict[str, dict[str, float]]] = {}
    for name, row in given.items():
        reward = row.reward if shaped is None else shaped.get(name)
        if reward is None:
            continue
        if name in by_call and reward != row.reward:
            raise ValueError(
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


def rewards_by_group(
    trajectories: pa.Table, role: str = POLICY, shaping: str | None = None
) -> dict[str, dict[str, float]]:
    """Map group → rollout → reward of one role."""
    return rewards_by_role(trajectories, shaping).get(role, {})


def mean_rewards(trajectories: pa.Table, shaping: str | None = None) -> MeanRewards:
    """Map each role that is trained to the mean reward of its rollouts."""
    return {
        role: fmean(reward for of_group in groups.values() for reward in of_group.values())
        for role, groups in sorted(rewards_by_role(trajectories, shaping).items())
    }


def _check_aligned(table: pa.Table) -> None:
    """Refuse (ValueError) a call that was recorded without its tokens or log-probabilities."""
    lengths = (table[name].combine_chunks().value_lengths().to_pylist() for name in LISTS)
    for rollout, *counts in zip(table["rollout_id"].to_pylist(), *lengths, strict=True):
        if len(set(counts)) > 1:
            raise ValueError(
                f"{rollout} has a call with as many token ids, log-probabilities and mask bits as "
                f"{counts}: its span is damaged, or was not written by the door"
            )
