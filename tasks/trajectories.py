"""spans → trajectories: calls whose tokens only grew, with their reward."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from adapters.calls import POLICY
from tasks.storage.checksums import verified
from tasks.storage.tables import arrays, select, write

QUERY = Path(__file__).with_suffix(".sql").read_text(encoding="utf-8")
TRAINED_ROLES = (POLICY,)
LISTS = ("tokens", "logprobs", "mask")


def assemble(spans: Path, trained_roles: Sequence[str] = TRAINED_ROLES) -> pa.Table:
    """The trajectories of a batch, sorted by rollout, role and first call.

    `tokens`, `logprobs` and `mask` are aligned: the mask is 1 exactly where a token was sampled by
    one of `trained_roles`, and the log-probability of a token nobody sampled is 0. Rollouts without
    a reward and superseded attempts do not appear. `call_numbers`, `call_tokens` (how many of the
    tokens a call added) and `call_rewards` (null if its role has none) are aligned too.

    `reward` is that of the trajectory's role: what the agent gave it, null if it gave only others
    one, or else the rollout's. Calls that no policy answered have no tokens.

    `begins` says why a trajectory does not continue an earlier call: it is `new` (a conversation
    without history), or a prefix broke. Then it is the door's reason (`adapters.door.prefixes.Prompt`),
    a `branch` (another call has already grown from the same one), or a `mismatch`: the door says
    the tokens were kept, and they are not the same.
    """
    table = select(QUERY, spans=verified(spans), trained=list(trained_roles))
    _check_aligned(table)
    return table


def write_trajectories(
    spans: Path, path: Path, trained_roles: Sequence[str] = TRAINED_ROLES
) -> Path:
    """`path`, holding the trajectories of `spans`."""
    return write(assemble(spans, trained_roles), path)


def rewards_by_role(trajectories: pa.Table) -> dict[str, dict[str, dict[str, float]]]:
    """Role → group → rollout → reward, where something is trained; a role may have no reward."""
    roles: dict[str, dict[str, dict[str, float]]] = {}
    scalars = trajectories.select(["role", "group_id", "rollout_id", "reward"]).to_pylist()
    for row, mask in zip(scalars, arrays(trajectories["mask"]), strict=True):
        if mask.any() and row["reward"] is not None:
            groups = roles.setdefault(row["role"], {})
            groups.setdefault(row["group_id"], {})[row["rollout_id"]] = row["reward"]
    return roles


def rewards_by_group(trajectories: pa.Table, role: str = POLICY) -> dict[str, dict[str, float]]:
    """Group → rollout → reward, of the rollouts in which something of the role is trained."""
    return rewards_by_role(trajectories).get(role, {})


def _check_aligned(table: pa.Table) -> None:
    """A call recorded without its token ids or log-probabilities must not train in silence."""
    lengths = (table[name].combine_chunks().value_lengths().to_pylist() for name in LISTS)
    for rollout, *counts in zip(table["rollout_id"].to_pylist(), *lengths, strict=True):
        if len(set(counts)) > 1:
            raise ValueError(
                f"{rollout} has a call with as many token ids, log-probabilities and mask bits as "
                f"{counts}: its span is damaged, or was not written by the door"
            )
