"""spans → trajectories: sequences of calls whose tokens only grew, with their reward."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import pyarrow as pa

from adapters.calls import POLICY
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
    other roles only, and the rollout's reward otherwise. Calls that no policy answered have no
    tokens.

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


def rewards_by_role(trajectories: pa.Table) -> dict[str, dict[str, dict[str, float]]]:
    """Map role → group → rollout → reward, of the trajectories in which something is trained."""
    roles: dict[str, dict[str, dict[str, float]]] = {}
    scalars = trajectories.select(["role", "group_id", "rollout_id", "reward"]).to_pylist()
    for row, mask in zip(scalars, arrays(trajectories["mask"]), strict=True):
        if mask.any() and row["reward"] is not None:
            groups = roles.setdefault(row["role"], {})
            groups.setdefault(row["group_id"], {})[row["rollout_id"]] = row["reward"]
    return roles


def rewards_by_group(trajectories: pa.Table, role: str = POLICY) -> dict[str, dict[str, float]]:
    """Map group → rollout → reward of one role."""
    return rewards_by_role(trajectories).get(role, {})


def mean_rewards(trajectories: pa.Table) -> MeanRewards:
    """Map each role that is trained to the mean reward of its rollouts."""
    return {
        role: fmean(reward for of_group in groups.values() for reward in of_group.values())
        for role, groups in sorted(rewards_by_role(trajectories).items())
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
