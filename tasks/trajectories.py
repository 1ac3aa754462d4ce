"""spans → trajectories: sequences of calls whose tokens only grew, with their reward."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from adapters.calls import POLICY
from tasks.storage.durability import durable
from tasks.storage.files import verified
from tasks.storage.tables import query_beside, select, write_table

TRAJECTORY_QUERY = query_beside(__file__)
TRAINED_ROLES = (POLICY,)
TOKEN_LISTS = ("tokens", "logprobs", "mask")


def trajectories_of(
    spans: Sequence[Path], trained_roles: Sequence[str] = TRAINED_ROLES
) -> pa.Table:
    """Assemble the trajectories of a step from its batches, sorted by rollout, role and first call.

    `tokens`, `logprobs` and `mask` are aligned: the mask is 1 exactly where a token was sampled by
    one of `trained_roles`, and the log-probability of a token nobody sampled is 0. Rollouts without
    a reward and superseded attempts do not appear. `call_numbers`, `call_tokens` (how many of the
    tokens a call added) and `call_rewards` (null if its role has no call rewards) are aligned too.

    `reward` is the reward of the trajectory's role if the agent rewards roles, null if it rewards
    other roles only, and the rollout's reward otherwise; `baseline` is the reward of the
    group's greedy rollout, null without such a rollout. `truncated` is whether an answer ended at
    its limit of tokens. Calls that no policy answered have no tokens.

    `begins` says why a trajectory does not continue an earlier call: it is `new` (a conversation
    without history), or tokens were not kept. Then it is the door's reason
    (`adapters.door.role_calls`), a `branch` (another call has already grown from the same one), or
    a `mismatch`: the door reported the tokens as kept, and they differ.
    """
    files = [verified(path) for path in spans]
    table = select(TRAJECTORY_QUERY, spans=files, trained=list(trained_roles))
    _check_aligned(table)
    return table


@durable
def assemble_trajectories(
    path: Path, spans: Sequence[Path], trained_roles: Sequence[str] = TRAINED_ROLES
) -> None:
    write_table(trajectories_of(spans, trained_roles), path)


def _check_aligned(table: pa.Table) -> None:
    """Refuse (ValueError) a call that was recorded without its tokens or log-probabilities."""
    lengths = (table[name].combine_chunks().value_lengths().to_pylist() for name in TOKEN_LISTS)
    for rollout, *counts in zip(table["rollout_id"].to_pylist(), *lengths, strict=True):
        if len(set(counts)) > 1:
            raise ValueError(
                f"{rollout} has a call with as many token ids, log-probabilities and mask bits as "
                f"{counts}: its span is damaged, or was not written by the door"
            )
