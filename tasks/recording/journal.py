"""spans → journal → Parquet: a span is a line with its CRC-32, on disk before an answer leaves."""

import json
import logging
import math
import os
import zlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from io import FileIO
from pathlib import Path
from threading import Event, Lock
from typing import IO, Any, NamedTuple, Self

import numpy as np
import orjson
import pyarrow as pa

from ratchet.adapters.errors import UserError
from ratchet.adapters.process.child import keep_from_children
from ratchet.durable.files import Tail, lock_file, sync
from ratchet.tasks.recording.records import ShortCalls, WholeCalls
from ratchet.tasks.recording.spans import (
    CREDIT,
    LLM,
    REWARD,
    SPAN_KINDS,
    TIMES,
    CallTokens,
    Span,
    count_tokens,
    footer_of,
    rows_of,
    span_identity,
)
from ratchet.tasks.storage.files import is_full, is_written
from ratchet.tasks.storage.tables import read_table, row_groups, write_parts

OPENING = b'{"crc32": "%08x", "span": '
CLOSING = b"}\n"

DIGITS_AS_ZEROS = bytes.maketrans(b"123456789", b"000000000")
LONG_NUMBER = b"0" * 19
"""Digits that an integer of 64 bits may not hold, as DIGITS_AS_ZEROS has them."""

FULL_SECONDS = 1.0
"""Delay between tries to write to a full disk."""

ROWS_TOGETHER = 256
"""Rows, at least, of the rollouts whose spans are in memory at once while a journal is sealed."""

JSON = ("messages", "reply", "tools", "attributes")
NUMBERS = {"prompt_token_ids": np.int32, "response_token_ids": np.int32, "logprobs": np.float32}

_time = pa.timestamp("us", "UTC")
_tokens = pa.list_(pa.field("element", pa.int32(), nullable=False))
_numbers = pa.list_(pa.field("element", pa.float32(), nullable=False))

SPAN_SCHEMA = pa.schema(
    [
        ("run_id", pa.string()),
        ("shard", pa.string()),
        ("step", pa.int32()),
        ("group_id", pa.string()),
        ("rollout_id", pa.string()),
        ("attempt", pa.int32()),
        ("role", pa.string()),
        ("call", pa.int32()),
        ("span_id", pa.string()),
        ("kind", pa.string()),
        ("started", _time),
        ("ended", _time),
        ("status", pa.string()),
        ("error_type", pa.string()),
        ("error_message", pa.string()),
        ("gen_ai_operation_name", pa.string()),
        ("gen_ai_provider_name", pa.string()),
        ("gen_ai_request_model", pa.string()),
        ("gen_ai_request_temperature", pa.float64()),
        ("gen_ai_request_top_p", pa.float64()),
        ("gen_ai_request_top_k", pa.int32()),
        ("gen_ai_request_max_tokens", pa.int32()),
        ("gen_ai_request_seed", pa.int64()),
        ("gen_ai_response_id", pa.string()),
        ("gen_ai_response_finish_reasons", pa.list_(pa.string())),
        ("gen_ai_usage_input_tokens", pa.int32()),
        ("gen_ai_usage_output_tokens", pa.int32()),
        ("messages", pa.json_()),
        ("reply", pa.json_()),
        ("tools", pa.json_()),
        ("attributes", pa.json_()),
        ("request_sha", pa.string()),
        ("recalled", pa.bool_()),
        ("policy_version", pa.string()),
        ("renderer", pa.string()),
        ("tokenizer_sha", pa.string()),
        ("prompt_token_ids", _tokens),
        ("response_token_ids", _tokens),
        ("logprobs", _numbers),
        ("kept_tokens", pa.int32()),
        ("kept_call", pa.int32()),
        ("kept_span_id", pa.string()),
        ("kept_how", pa.string()),
        ("reward_name", pa.string()),
        ("reward", pa.float64()),
    ]
)

log = logging.getLogger(__name__)


class JournalError(UserError):
    """Refusal of a journal that is damaged or cannot be written."""


class Line(NamedTuple):
    """A line of a journal: its number from 1, and the place of its first byte."""

    number: int
    place: int


class Journal:
    """A batch's journal. A span is synced to disk when the future of its `append` is done.

    Appends that wait at the same time share one write and one sync. One process at a time has a
    journal open. A journal that is opened after a crash continues after its last whole line.
    Appends wait while the disk is full. After any other failed write the journal refuses further
    spans, since the contents of the disk are unknown.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file, spans = _open(path)
        self._end = self._file.tell()
        self._known = {span_identity(span) for span in spans}
        self._calls = ShortCalls(spans)
        self._waiting: list[bytes] = []
        self._broken: OSError | None = None
        self._leaving = Event()
        self._full = Event()
        self._adding = Lock()
        self._writer = ThreadPoolExecutor(1, f"journal {path.name}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def full(self) -> bool:
        """True while appends wait for space on the disk."""
        return self._full.is_set()

    def close(self) -> None:
        """Write the waiting spans, unless the disk is full, and close the file."""
        with self._adding:
            self._leaving.set()
        self._writer.shutdown()
        self._file.close()

    def append(self, span: Span) -> Future[None]:
        """Append a span, which reaches the disk no later than any later span.

        The future is done when it has: it is shielded where it is awaited. ValueError if the span
        breaks an invariant.
        """
        check_span(span)
        key = span_identity(span)
        with self._adding:
            if self._leaving.is_set():
                raise JournalError(f"{self.path} is closed; open it again to append to it")
            if key in self._known:
                raise ValueError(f"{self.path} already has the span {key}; it is recorded once")
            # What is known is what waits or is written: a record names only what is before it.
            self._waiting.append(_line(self._calls.write(span)))
            self._known.add(key)
            return self._writer.submit(self._write)

    def _write(self) -> None:
        """Write, in the writer's thread, all waiting spans with one sync, once there is space."""
        with self._adding:
            lines, self._waiting = self._waiting, []
        data, file = b"".join(lines), self._file.fileno()
        try:
            if self._broken is not None:
                raise self._broken
            while lines:
                try:
                    rest = memoryview(data)
                    while rest:
                        rest = rest[os.write(file, rest) :]
                    os.fsync(file)
                    break
                except OSError as error:
                    if not is_full(error):
                        raise
                    self._file.truncate(self._end)  # cuts off a partial write
                    if self._left_while_full():
                        raise
            self._end += len(data)
            self._full.clear()
        except OSError as error:
            self._broken = error
            raise JournalError(f"{self.path} cannot be written: {error}") from error

    def _left_while_full(self) -> bool:
        """Wait a moment for space; return whether the journal is closed meanwhile."""
        if not self.full:
            log.warning("the disk of %s is full; writing goes on when there is space", self.path)
        self._full.set()
        return self._leaving.wait(FULL_SECONDS)


def read_journal(path: Path) -> list[Span]:
    """Read the spans of a journal, in order. A torn last line does not count."""
    calls = WholeCalls()
    with path.open("rb") as file:
        return [_whole(calls, record, line, path) for line, record in _records(file, path)]


def copy_without(journal: Path, rollouts: Collection[str], path: Path) -> None:
    """Write to `path` the lines of a journal, as they are, without those of some rollouts."""
    with journal.open("rb") as file, path.open("wb") as copy:
        records = _records(file, journal)
        kept = [line.place for line, record in records if record["rollout_id"] not in rollouts]
        for place in kept:
            file.seek(place)
            copy.write(file.readline())


class JournalTail:
    """Reader of the records that were added to a journal since its last look.

    People look at what it reads, so it compares no checksums, and leaves out what a call repeats.
    """

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)

    def read(self) -> tuple[list[Span], bool]:
        """Return the records since the last look, and whether they are all that the journal has."""
        appended = self._tail.read()
        return [_record(line + b"\n") for line in appended.lines], appended.anew


def seal(journal: Path, parquet: Path) -> Path:
    """Write the rows of a journal's spans to `parquet`, sorted, unless that exists.

    The journal stays, and what is sealed depends on nothing else. Rollouts are read one after the
    other: their spans are never all in memory. The footer has the tokens of the calls.
    """
    if not is_written(parquet):
        tokens: CallTokens = {}
        tables = _tables(journal, tokens)
        write_parts(row_groups(tables), SPAN_SCHEMA, parquet, lambda: footer_of(tokens))
    return parquet


def _tables(journal: Path, tokens: CallTokens) -> Iterator[pa.Table]:
    """Yield the rows of some rollouts at a time, in order; one table at least, if without a row."""
    rows: list[Span] = []
    with journal.open("rb") as file:
        lines = defaultdict[str, list[Line]](list)
        for line, record in _records(file, journal):
            lines[record["rollout_id"]].append(line)
        for rollout in sorted(lines):
            own = rows_of(_read_rollout(file, lines[rollout], journal))
            for key, sums in count_tokens(own).items():
                tokens.setdefault(key, Counter()).update(sums)
            rows += own
            if len(rows) >= ROWS_TOGETHER:
                yield spans_table(rows)
                rows = []
    yield spans_table(rows)


def _read_rollout(file: IO[bytes], lines: Sequence[Line], path: Path) -> list[Span]:
    """Read the spans of a rollout; JournalError if one is there twice."""
    calls, spans = WholeCalls(), list[Span]()
    for line in lines:
        file.seek(line.place)
        spans.append(_whole(calls, _record(file.readline()), line, path))
    repeated = [key for key, count in Counter(map(span_identity, spans)).items() if count > 1]
    if repeated:
        raise JournalError(f"{path} has the span {repeated[0]} twice; a span is made once")
    return spans


def read_spans(path: Path) -> pa.Table:
    """Read the spans of a journal or of its Parquet file: the same table from either."""
    if path.suffix == ".jsonl":
        return spans_table(rows_of(read_journal(path)))
    return read_table(path, schema=SPAN_SCHEMA)


def _open(path: Path) -> tuple[FileIO, list[Span]]:
    """Open and lock a journal, cut its torn end, sync its name; return the file and its spans."""
    file = path.open("ab+", buffering=0)
    keep_from_children(file)
    try:
        if not lock_file(file):
            raise JournalError(f"{path} is being written by another process; wait for it")
        spans = read_journal(path)
    except JournalError:
        file.close()
        raise
    file.truncate(path.read_bytes().rfind(b"\n") + 1)
    file.seek(0, os.SEEK_END)
    sync(path.parent)
    return file, spans


def _records(file: IO[bytes], path: Path) -> Iterator[tuple[Line, Span]]:
    """Yield the records of whole lines; JournalError if one is damaged."""
    place = 0
    for number, line in enumerate(file, start=1):
        torn = not line.endswith(b"\n")
        if (torn and _held_a_span(line)) or not (torn or _intact(line)):
            raise JournalError(
                f"{path}, line {number}, is damaged: its checksum does not fit. Restore the "
                "file from a copy, or remove the line and lose what was sampled there"
            )
        if not torn:
            yield Line(number, place), _record(line)
        place += len(line)


def _whole(calls: WholeCalls, record: Span, line: Line, path: Path) -> Span:
    """Return the span of a record; JournalError if the call that it names is not before it."""
    try:
        return calls.read(record)
    except KeyError:
        raise JournalError(
            f"{path}, line {line.number}, names a call of {record['rollout_id']} that is not "
            "before it. Restore the file from a copy, or remove this line too, with what was "
            "sampled there"
        ) from None


def _line(record: bytes) -> bytes:
    """Write a line; its checksum is over the record's bytes as they stand in it."""
    return OPENING % zlib.crc32(record) + record + CLOSING


def _intact(line: bytes) -> bool:
    return line == _line(_data(line))


def _held_a_span(tail: bytes) -> bool:
    """Return whether a tail without a newline holds a whole line, so that it is not torn."""
    text = tail[len(OPENING % 0) :].decode("ascii", "replace")
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except ValueError:
        return False
    whole = len(OPENING % 0) + end + len(CLOSING)
    return len(tail) >= whole and _intact(tail[: whole - 1] + b"\n")


def _data(line: bytes) -> bytes:
    return line[len(OPENING % 0) : -len(CLOSING)]


def _record(line: bytes) -> Span:
    record = _parse(_data(line))
    times = {name: datetime.fromisoformat(record[name]) for name in TIMES if record.get(name)}
    return record | times


def _parse(data: bytes) -> Span:
    """Parse JSON: orjson is fast, but rounds integers that need more than 64 bits."""
    if LONG_NUMBER not in data.translate(DIGITS_AS_ZEROS):
        with suppress(ValueError):  # orjson reads no half of a surrogate pair
            return orjson.loads(data)
    return json.loads(data)


def check_span(span: Span) -> None:
    """Refuse (ValueError) a span that the assembly of trajectories would misread."""
    unknown = span.keys() - set(SPAN_SCHEMA.names)
    if unknown:
        raise ValueError(f"a span has no column {', '.join(sorted(unknown))}; see SPAN_SCHEMA")
    if span.get("kind") not in SPAN_KINDS:
        raise ValueError(
            f"a span's kind is one of {', '.join(SPAN_KINDS)}, not {span.get('kind')!r}"
        )
    if span["kind"] == LLM:
        _check_tokens(span)
    given = span.get("reward") is not None or span["kind"] == CREDIT
    if span["kind"] in (REWARD, CREDIT) and given and not math.isfinite(span["reward"]):
        raise ValueError(f"{span['span_id']} has the reward {span['reward']}; it must be finite")


def _check_tokens(span: Span) -> None:
    who, logprobs, kept = span["span_id"], span["logprobs"], span["kept_tokens"]
    asked, answered = len(span["prompt_token_ids"]), len(span["response_token_ids"])
    if len(logprobs) != answered:
        raise ValueError(f"{who} has {answered} tokens and {len(logprobs)} log-probabilities")
    if not all(map(math.isfinite, logprobs)):
        raise ValueError(f"{who} has a log-probability that is not a finite number")
    if not 0 <= kept <= asked:
        raise ValueError(f"{who} keeps {kept} tokens of a prompt of {asked}")


def spans_table(spans: Iterable[Span]) -> pa.Table:
    """Convert spans to an Arrow table, sorted so that similar prompts lie together."""
    rows = sorted(spans, key=_order)
    return pa.Table.from_pylist([_for_arrow(span) for span in rows], schema=SPAN_SCHEMA)


def _order(span: Span) -> tuple[Any, ...]:
    """Return the sort key: rollout, attempt, role, call; spans without a role come last."""
    role, call = span.get("role"), span.get("call")
    return span["rollout_id"], span["attempt"], role is None, role or "", call or 0, span["kind"]


def _for_arrow(span: Span) -> Span:
    """Return a span with its JSON as text, and its numbers as arrays, which Arrow copies whole."""
    texts = {k: json.dumps(span[k], ensure_ascii=False) for k in JSON if span.get(k) is not None}
    numbers = {k: np.asarray(span[k], t) for k, t in NUMBERS.items() if span.get(k) is not None}
    return span | texts | numbers
