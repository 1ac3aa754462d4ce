"""sealed spans → trajectories: sequences of calls whose tokens only grew, with their reward.

Files are read a row group at a time, and only what is new in their calls is kept.
"""

from array import array
from collections.abc import Iterator, Sequence
from itertools import compress, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from ratchet.adapters.calls import POLICY
from ratchet.tasks.recording.records import LOGPROBS, TOKENS
from ratchet.tasks.recording.spans import LLM
from ratchet.tasks.storage.durability import durable
from ratchet.tasks.storage.tables import (
    ROWS_A_GROUP,
    arrays,
    flat_values,
    query_beside,
    read_parts,
    select,
    write_parts,
)

TRAJECTORY_QUERY = query_beside(__file__)
TRAINED_ROLES = (POLICY,)
TOKEN_LISTS = {
    "tokens": pa.list_(pa.int32()),
    "logprobs": pa.list_(pa.float32()),
    "mask": pa.list_(pa.int8()),
}
PLACES = "places"
"""Column of the query: the places of a trajectory's calls in the turns."""

ANSWER = "response_token_ids"
CALL_LISTS = (TOKENS, ANSWER, LOGPROBS)
ROLE = ("rollout_id", "attempt", "role")
"""Columns that are equal in all calls of a role in an attempt, whose rows stand together."""
CALL = ("call", "kept_call")
OF_SPANS = (
    "kind", "error_type", "group_id", "policy_version", "kept_how",
    "gen_ai_response_finish_reasons", "reward_name", "reward",
)  # fmt: skip
BYTES = 4
"""Size of a token."""


class Call(NamedTuple):
    """An answered call: its number, the call that it names, and the bytes of its tokens."""

    number: int
    kept: int | None
    prompt: bytes
    answer: bytes


class TurnReader:
    """Reader of the answered calls of a role in an attempt, one role after the other."""

    def __init__(self) -> None:
        self.new = array("i")
        """Tokens that are new in the calls and were not sampled."""
        self.asked = array("q")
        """How many of them each call has."""
        self.first_calls = array("i")
        self.grew = array("b")
        self._role: tuple[object, ...] = ()
        self._calls: list[Call] = []

    def read(self, spans: pa.Table, answered: Sequence[bool]) -> None:
        """Read the answered calls of further spans, which may go on with the last role."""
        roles = zip(*(spans[name].to_pylist() for name in ROLE), strict=True)
        numbers = (spans[name].to_pylist() for name in CALL)
        calls = zip(*numbers, _bytes_of(spans[TOKENS]), _bytes_of(spans[ANSWER]), strict=True)
        for role, call in compress(zip(roles, calls, strict=True), answered):
            if role != self._role:
                self.finish()
                self._role = role
            self._calls.append(Call(*call))

    def finish(self) -> None:
        """Take in the calls of a role.

        A call goes on from the call that it names, or else from the one before it, if it grew from
        that; of several calls that grew from one, the first goes on.
        """
        numbered = {call.number: call for call in self._calls}
        goes_on: dict[int, int] = {}
        taken: set[int] = set()
        before: Call | None = None
        for call in self._calls:
            earlier = before if call.kept is None else numbered.get(call.kept)
            before, known = call, 0
            grew = earlier is not None and call.prompt.startswith(earlier.prompt + earlier.answer)
            if earlier is not None and grew and earlier.number not in taken:
                taken.add(earlier.number)
                goes_on[call.number] = earlier.number
                known = len(earlier.prompt) + len(earlier.answer)
            self.grew.append(grew)
            self.new.frombytes(call.prompt[known:])
            self.asked.append((len(call.prompt) - known) // BYTES)
        firsts: dict[int, int] = {}
        for number in numbered:
            first, passed = number, set[int]()
            while first in goes_on and first not in firsts and first not in passed:
                passed.add(first)
                first = goes_on[first]
            firsts[number] = firsts.get(first, first)
            self.first_calls.append(firsts[number])
        self._calls = []


class Turns:
    """Answered calls of a step, by their places, with the tokens that are new in each.

    `asked` counts the new tokens, `answered` the sampled ones, `scored` their scores.
    """

    def __init__(
        self, reader: TurnReader, answers: pa.ChunkedArray, logprobs: pa.ChunkedArray
    ) -> None:
        self.asked = np.array(reader.asked)
        self.answered, self.scored = _lengths(answers), _lengths(logprobs)
        self._asked = np.frombuffer(reader.new, np.int32), np.cumsum(self.asked)
        self._answers = flat_values(answers), np.cumsum(self.answered)
        self._logprobs = flat_values(logprobs), np.cumsum(self.scored)

    @property
    def lengths(self) -> np.ndarray:
        return self.asked + self.answered

    def joined(self, calls: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Join calls: their new tokens, the log-probability of each, and whether it was sampled."""
        asked, answered = self.asked[calls], self.answered[calls]
        lengths = np.stack([asked, answered], axis=1).ravel()
        sampled = np.repeat(np.tile([False, True], len(calls)), lengths)
        tokens, logprobs = np.empty(len(sampled), np.int32), np.zeros(len(sampled), np.float32)
        tokens[~sampled] = _slices(*self._asked, calls, asked)
        tokens[sampled] = _slices(*self._answers, calls, answered)
        logprobs[sampled] = _slices(*self._logprobs, calls, answered)
        return tokens, logprobs, sampled


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
    table, turns = _read_turns(spans)
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


def _read_turns(paths: Sequence[Path]) -> tuple[pa.Table, Turns]:
    """Read sealed batches: their spans without tokens, and the turns of their answered calls.

    The table has further columns for answered calls: the `place` in the turns, how many tokens are
    new, the first call of the trajectory, and whether the call grew from an earlier one.
    """
    spans, answers, reader = [], [], TurnReader()
    columns = (*ROLE, *CALL, *OF_SPANS, *CALL_LISTS)
    for part in read_parts(paths, columns):
        answered = _answered(part)
        reader.read(part, answered.tolist())
        spans.append(part.drop_columns([*CALL_LISTS]))
        answers.append(part.select([ANSWER, LOGPROBS]).filter(pa.array(answered)))
    reader.finish()
    of_calls = pa.concat_tables(answers)
    turns = Turns(reader, of_calls[ANSWER], of_calls[LOGPROBS])
    return _with_turns(pa.concat_tables(spans), turns, reader), turns


def _answered(spans: pa.Table) -> np.ndarray:
    return (spans["kind"].to_numpy() == LLM) & spans["error_type"].is_null().to_numpy()


def _bytes_of(column: pa.ChunkedArray) -> Iterator[bytes]:
    for chunk in column.chunks:
        data = chunk.values.to_numpy().view(np.uint8).data
        for start, end in pairwise((chunk.offsets.to_numpy() * BYTES).tolist()):
            yield data[start:end].tobytes()


def _lengths(column: pa.ChunkedArray) -> np.ndarray:
    lengths = column.combine_chunks().value_lengths().fill_null(0)
    return lengths.to_numpy().astype(np.int64)


def _slices(
    values: np.ndarray, all_ends: np.ndarray, calls: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    """Join the values of calls; slices that are neighbours are one."""
    ends = all_ends[calls]
    starts = ends - lengths
    apart = np.flatnonzero(starts[1:] != ends[:-1])
    begins, stops = starts[np.r_[0, apart + 1]], ends[np.r_[apart, len(ends) - 1]]
    return np.concatenate([values[a:b] for a, b in zip(begins, stops, strict=True)])


def _with_turns(spans: pa.Table, turns: Turns, reader: TurnReader) -> pa.Table:
    of_calls = pa.table(
        {
            "place": pa.array(range(len(turns.asked)), pa.int64()),
            "new_tokens": turns.lengths,
            "first_call": np.array(reader.first_calls),
            "grew": np.array(reader.grew, bool),
        }
    )
    answered = _answered(spans)
    places = pa.array(np.cumsum(answered) - 1, mask=~answered)
    for name, column in zip(of_calls.column_names, of_calls.take(places).columns, strict=True):
        spans = spans.append_column(name, column)
    return spans
