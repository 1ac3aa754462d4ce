"""spans → trajectories: sequences of calls whose tokens only grew, with their reward."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from ratchet.adapters.calls import POLICY
from ratchet.tasks.recording.turns import Turns, read_turns
from ratchet.tasks.storage.durability import durable
from ratchet.tasks.storage.tables import ROWS_A_GROUP, arrays, query_beside, select, write_parts

TRAJECTORY_QUERY = query_beside(__file__)
TRAINED_ROLES = (POLICY,)
TOKEN_LISTS = {
    "tokens": pa.list_(pa.int32()),
    "logprobs": pa.list_(pa.float32()),
    "mask": pa.list_(pa.int8()),
}
PLACES = "places"
"""Column of the query: the places of a trajectory's calls in the turns."""


def trajectories_of(
    spans: Sequence[Path], trained_roles: Sequence[str] = TRAINED_ROLES
) -> pa.Table:
    """Assemble the trajectories of a step from its batches, sorted by rollout, role and first call.

    `tokens`, `logprobs` and `mask` are aligned: the mask is 1 exactly where a token was sampled by
    one of `trained_roles`, and the log-probability of a token nobody sampled is 0. Rollouts without
    a reward and superseded attempts do not appear. `call_numbers`, `call_tokens` (how many of the
    tokens a call added) and `call_rewards` (null if its role has no call rewards) are aligned too.

    `reward` is the reward of the trajectory's role if the agent rewards roles, null if it rewards
    other roles only, and the rollout's reward otherwise. `truncated` is whether an answer ended at
    its limit of tokens. Calls that no policy answered have no tokens.

    `begins` says why a trajectory does not continue an earlier call: it is `new` (a conversation
    without history), or tokens were not kept. Then it is the door's reason
    (`adapters.door.role_calls`), a `branch` (another call has already grown from the same one), or
    a `mismatch`: the door reported the tokens as kept, and they differ.
    """
    schema, parts = _assembled(spans, trained_roles)
    return pa.concat_tables([schema.empty_table(), *parts])


@durable
def assemble_trajectories(
    path: Path, spans: Sequence[Path], trained_roles: Sequence[str] = TRAINED_ROLES
) -> None:
    schema, parts = _assembled(spans, trained_roles)
    write_parts(parts, schema, path)


def _assembled(
    spans: Sequence[Path], trained_roles: Sequence[str]
) -> tuple[pa.Schema, Iterator[pa.Table]]:
    """Return the schema of trajectories, and their rows, a row group at a time."""
    table, turns = read_turns(spans)
    rows = select(TRAJECTORY_QUERY, {"spans": table})
    described = rows.drop_columns([PLACES])
    schema = pa.schema([*described.schema, *TOKEN_LISTS.items()])

    def parts() -> Iterator[pa.Table]:
        for at in range(0, len(rows), ROWS_A_GROUP):
            part, places = (
                described.slice(at, ROWS_A_GROUP),
                arrays(rows[PLACES].slice(at, ROWS_A_GROUP)),
            )
            _check_aligned(part, places, turns)
            lists = _token_lists(part, places, turns, trained_roles)
            yield pa.table([*part.columns, *lists], schema=schema)

    return schema, parts()


def _token_lists(
    rows: pa.Table, places: Sequence[np.ndarray], turns: Turns, trained_roles: Sequence[str]
) -> list[pa.Array]:
    """Join the TOKEN_LISTS of trajectories, by the places of each one's calls."""
    calls = np.concatenate(places)
    tokens, logprobs, sampled = turns.joined(calls)
    ends = np.cumsum([turns.lengths[own].sum() for own in places])
    offsets = pa.array([0, *ends], pa.int32())
    trained = np.isin(rows["role"].to_numpy(), [*trained_roles])
    mask = sampled & np.repeat(trained, np.diff(ends, prepend=0))
    return [
        pa.ListArray.from_arrays(offsets, pa.array(values, kind.value_type))
        for values, kind in zip(
            (tokens, logprobs, mask.astype(np.int8)), TOKEN_LISTS.values(), strict=True
        )
    ]


def _check_aligned(rows: pa.Table, places: Sequence[np.ndarray], turns: Turns) -> None:
    """Refuse (ValueError) a call that was recorded without its tokens or log-probabilities."""
    for rollout, own in zip(rows["rollout_id"].to_pylist(), places, strict=True):
        if not np.array_equal(turns.answered[own], turns.scored[own]):
            tokens, asked = int(turns.lengths[own].sum()), turns.asked[own]
            counts = [tokens, int((asked + turns.scored[own]).sum()), tokens]
            raise ValueError(
                f"{rollout} has a call with as many token ids, log-probabilities and mask bits as "
                f"{counts}: its span is damaged, or was not written by the door"
            )
