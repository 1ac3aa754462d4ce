"""spans ↔ records of a journal: a call's record names an earlier call, and holds what is new.

The prompt of a call mostly repeats an earlier prompt and its answer, and so do its messages; other
columns are those of every call of its role. The record leaves out what is repeated, so that a
journal grows with what is new. It names only a call whose record stands before it in the same
journal, so a journal whose end was cut off can still be read.
"""

import json
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, MutableSequence, Sequence
from datetime import datetime
from itertools import compress, count
from operator import ne
from typing import Any, NamedTuple

import numpy as np
import orjson

from ratchet.tasks.recording.spans import ERROR, LLM, REWARD, Span

REPEATS = "repeats"
"""Key of a record: the attempt and the number of an earlier call of the rollout's role; and, by
column of ANSWERS, how many first elements of that call and its answer come before the record's own.
Columns of EQUAL that the record lacks are those of the earlier call."""

TOKENS = "prompt_token_ids"
ANSWERS = {TOKENS: "response_token_ids", "messages": "reply"}
"""Column that grows with a conversation → the column of the answer, which comes next in it."""

EQUAL = (
    "run_id", "shard", "step", "group_id", "status", "gen_ai_operation_name",
    "gen_ai_provider_name", "gen_ai_request_model", "gen_ai_request_temperature",
    "gen_ai_request_top_p", "gen_ai_request_top_k", "gen_ai_request_max_tokens", "tools",
    "attributes", "policy_version", "renderer", "tokenizer_sha",
)  # fmt: skip
"""Columns that rarely differ between calls of a role."""

LOGPROBS, SINGLE = "logprobs", "float32"
"""Column of log-probabilities, and its only key if they stand with the digits of 32 bits."""


class WholeCalls:
    """Reader of a journal's records, in their order."""

    def __init__(self) -> None:
        self._calls: dict[tuple[object, ...], Span] = {}

    def read(self, record: Span) -> Span:
        """Return the span of a record; KeyError if the call that it names is not before it."""
        if record["kind"] != LLM:
            return record
        record = record | _as_arrays(record)
        repeats = record.pop(REPEATS, None)
        if repeats is not None:
            earlier = self._calls[_place(record | repeats)]
            record = {name: earlier[name] for name in EQUAL if name in earlier} | record
            for column in ANSWERS.keys() & repeats.keys():
                record[column] = _told(earlier, column)[: repeats[column]] + record[column]
        self._calls[_place(record)] = record
        return record


class WrittenCall(NamedTuple):
    """A call whose record is written.

    The calls of a conversation share the lists of `told`, which grow with the conversation; of each
    the call and its answer are the first elements, as many as `lengths` says.
    """

    attempt: int
    number: int
    told: Mapping[str, MutableSequence[Any]]
    lengths: Mapping[str, int]
    equal: Mapping[str, bytes]
    """JSON of the columns of EQUAL."""


NOTHING = WrittenCall(-1, -1, {}, {}, {})
"""Call that a call repeats if none is known."""


class ShortCalls:
    """Writer of a journal's records; it knows the calls of the rollouts that have not ended."""

    def __init__(self, written: Iterable[Span] = ()) -> None:
        self._calls: dict[str, dict[tuple[object, ...], WrittenCall]] = defaultdict(dict)
        for span in written:
            self.write(span)

    def write(self, span: Span) -> bytes:
        """Write the record of the next span of a journal, as JSON.

        Later records may name it, so it must come before them. A span whose record cannot be made
        (ValueError, TypeError, OverflowError) is named by no other.
        """
        if span["kind"] == LLM:
            return self._write_call(span)
        if span["kind"] in (REWARD, ERROR):
            self._calls.pop(span["rollout_id"], None)
        return _to_json(span)

    def _write_call(self, span: Span) -> bytes:
        told = {column: _comparable(span, column) for column in ANSWERS if span.get(column)}
        lengths = {column: len(elements) for column, elements in told.items()}
        equal = {name: _to_json(span[name]) for name in EQUAL if name in span}
        earlier = self._earlier(span)
        if not earlier.equal.keys() <= equal.keys():
            earlier = NOTHING
        shared = {
            column: _count_shared(told[column][: len(span[column])], earlier, column)
            for column in told.keys() & earlier.told.keys()
        }
        record = span | {LOGPROBS: _with_few_digits(span[LOGPROBS])}
        if earlier is not NOTHING:
            lacks = {name for name in equal if equal[name] == earlier.equal.get(name)}
            named = {"attempt": earlier.attempt, "call": earlier.number}
            record = {name: value for name, value in record.items() if name not in lacks}
            record |= {column: span[column][many:] for column, many in shared.items()}
            record[REPEATS] = named | shared
        data = _to_json(record)
        for column, many in shared.items():
            so_far = earlier.told[column]
            if many == earlier.lengths[column] == len(so_far):
                so_far.extend(told[column][many:])
                told[column] = so_far
        kept = earlier.equal if equal == earlier.equal else equal
        call = WrittenCall(span["attempt"], span["call"], told, lengths, kept)
        self._calls[span["rollout_id"]][_place(span)] = call
        return data

    def _earlier(self, span: Span) -> WrittenCall:
        """Find the call that the door has found the prompt to repeat, or else the role's latest."""
        calls = self._calls.get(span["rollout_id"], {})
        latest = (calls[place] for place in reversed(calls) if place[1] == span["role"])
        kept = _place(span | {"call": span.get("kept_call")})
        return calls.get(kept) or next(latest, NOTHING)


def _place(call: Span) -> tuple[object, ...]:
    return call["rollout_id"], call["role"], call["attempt"], call["call"]


def _as_arrays(record: Span) -> Span:
    """Return the token ids and log-probabilities of a record as arrays, which need little room."""
    logprobs = record[LOGPROBS]
    single = isinstance(logprobs, dict)
    return {
        **{column: array("i", record[column]) for column in (TOKENS, ANSWERS[TOKENS])},
        LOGPROBS: array("f", logprobs[SINGLE]) if single else array("d", logprobs),
    }


def _told(call: Span, column: str) -> MutableSequence[Any]:
    """Return what a call has in a column, and its answer."""
    if column == TOKENS:
        return array("i", call[column]) + array("i", call[ANSWERS[column]])
    answer = call.get(ANSWERS[column])
    return [*call[column], answer] if answer else call[column]


def _comparable(call: Span, column: str) -> MutableSequence[Any]:
    """Return the same elements as values that are equal only if they are equal as JSON."""
    told = _told(call, column)
    return told if column == TOKENS else [_to_json(element) for element in told]


def _count_shared(own: MutableSequence[Any], earlier: WrittenCall, column: str) -> int:
    """Count the first elements that a call shares with an earlier call and its answer."""
    most = min(len(own), earlier.lengths[column])
    one, other = own[:most], earlier.told[column][:most]
    return most if one == other else next(compress(count(), map(ne, one, other)))


def _with_few_digits(logprobs: Sequence[float]) -> Sequence[float] | dict[str, Sequence[float]]:
    """Return numbers of 32 bits with no more digits than these need; others as they are."""
    single = array("f", logprobs)
    if [*single] != [*logprobs]:
        return logprobs
    digits = orjson.dumps(np.frombuffer(single, np.float32), option=orjson.OPT_SERIALIZE_NUMPY)
    short = orjson.loads(digits)
    return {SINGLE: short} if array("f", short) == single else logprobs


def _to_json(value: object) -> bytes:
    try:
        return orjson.dumps(value, default=np.asarray, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:  # a number of more than 64 bits, or half of a surrogate pair
        text = json.dumps(value, default=_plain, separators=(",", ":"), allow_nan=False)
        return text.encode()


def _plain(value: Any) -> object:
    return value.tolist() if isinstance(value, array) else datetime.isoformat(value)
