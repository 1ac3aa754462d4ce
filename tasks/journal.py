"""span → journal → Parquet. A span is on disk before anyone hears of it: a line with its CRC-32."""

import asyncio
import fcntl
import json
import logging
import os
import queue
import zlib
from collections import Counter
from concurrent.futures import Future
from datetime import datetime
from io import FileIO
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Self

import orjson
import pyarrow as pa

from adapters.children import keep_from_children
from adapters.errors import UserError
from tasks.spans import SCHEMA, TIMES, Span, check, identity, table, without_answered
from tasks.storage.files import is_full
from tasks.storage.tables import read, write

OPENING = b'{"crc32": "%08x", "span": '
CLOSING = b"}\n"

FULL_SECONDS = 1.0
"""How often a full disk is tried again."""

log = logging.getLogger(__name__)


class JournalError(UserError):
    """A journal cannot be trusted, or cannot be written to."""


class Journal:
    """Appends spans durably: each is synced to disk when its `append` returns.

    Appends that wait at the same time share one write and one sync. A journal is one process's at a
    time. Opened again after a crash, it goes on after its last whole line. While the disk is full
    appends wait. Once a write has failed otherwise it takes no more: what the disk then holds is
    not known.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file, spans = _opened(path)
        self._end = self._file.tell()
        self._known = {identity(span) for span in spans}
        self._waiting: queue.SimpleQueue[tuple[bytes, Future[None]] | None] = queue.SimpleQueue()
        self._broken: OSError | None = None
        self._closed = False
        self._leaving = Event()
        self._full = Event()
        self._adding = Lock()
        self._writer = Thread(target=self._write, name=f"journal {path.name}", daemon=True)
        self._writer.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def append(self, span: Span) -> None:
        """Durably add a span, from any event loop; one that breaks an invariant is refused."""
        await asyncio.wrap_future(self._submit(span))

    def append_now(self, span: Span) -> None:
        """`append` for code that may block."""
        self._submit(span).result()

    @property
    def full(self) -> bool:
        """Whether appends wait for space on the disk."""
        return self._full.is_set()

    def append_soon(self, span: Span) -> None:
        """Add a span without waiting: it is on disk no later than any that is added after it."""
        self._submit(span)

    def close(self) -> None:
        """Write what waits, unless the disk is full, and let the file go."""
        with self._adding:
            if self._closed:
                return
            self._closed = True
            self._waiting.put(None)
        self._leaving.set()
        self._writer.join()
        self._file.close()

    def _submit(self, span: Span) -> Future[None]:
        check(span)
        line, key = _line(span), identity(span)
        written: Future[None] = Future()
        written.set_running_or_notify_cancel()  # a span that has been handed over stays
        with self._adding:
            if self._closed:
                raise JournalError(f"{self.path} is closed; open it again to append to it")
            if key in self._known:
                raise ValueError(f"{self.path} already has the span {key}; it is recorded once")
            self._known.add(key)
            self._waiting.put((line, written))
        return written

    def _write(self) -> None:
        """The writer's thread: everything that has gathered, in one write and one sync."""
        ends = False
        while not ends:
            gathered = [self._waiting.get()]
            while not self._waiting.empty():
                gathered.append(self._waiting.get())
            ends = None in gathered
            self._commit([entry for entry in gathered if entry is not None])

    def _commit(self, entries: list[tuple[bytes, Future[None]]]) -> None:
        try:
            if self._broken is not None:
                raise self._broken
            if entries:
                self._write_whole(b"".join(line for line, _ in entries))
        except OSError as error:
            self._broken = error
            for _, written in entries:
                written.set_exception(JournalError(f"{self.path} cannot be written: {error}"))
            return
        for _, written in entries:
            written.set_result(None)

    def _write_whole(self, data: bytes) -> None:
        """Write and sync, when there is space. A part that was written is cut off first."""
        while True:
            try:
                self._write_once(data)
            except OSError as error:
                if not is_full(error):
                    raise
                self._file.truncate(self._end)
                if not self.full:
                    text = "the disk of %s is full; writing goes on when there is space"
                    log.warning(text, self.path)
                self._full.set()
                if self._leaving.wait(FULL_SECONDS):
                    raise
            else:
                self._end += len(data)
                self._full.clear()
                return

    def _write_once(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._file.fileno(), rest) :]
        os.fsync(self._file.fileno())


def read_journal(path: Path) -> list[Span]:
    """The spans of a journal, in the order of their writing. A torn last line never counted."""
    spans = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            torn = not line.endswith(b"\n")
            if (torn and _held_a_span(line)) or not (torn or _intact(line)):
                raise JournalError(
                    f"{path}, line {number}, is damaged: its checksum does not fit. Restore the "
                    "file from a copy, or remove the line and lose what was sampled there"
                )
            if not torn:
                spans.append(_span(line))
    return spans


def seal(journal: Path, parquet: Path) -> Path:
    """`parquet`, holding the journal's spans, sorted; made once. The journal stays.

    Of the calls that were begun only the lost ones are kept.
    """
    if not parquet.exists():
        spans = read_journal(journal)
        repeated = [key for key, count in Counter(map(identity, spans)).items() if count > 1]
        if repeated:
            raise JournalError(f"{journal} has the span {repeated[0]} twice; a span is made once")
        write(table(without_answered(spans)), parquet)
    return parquet


def read_spans(path: Path) -> pa.Table:
    """The spans of a journal or of its Parquet, the same table from either."""
    if path.suffix == ".jsonl":
        return table(without_answered(read_journal(path)))
    return read(path, schema=SCHEMA)


def _opened(path: Path) -> tuple[FileIO, list[Span]]:
    """The file, locked, at its end, its torn tail cut, and its name on disk; and what it holds."""
    file = path.open("ab+", buffering=0)
    keep_from_children(file)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        spans = read_journal(path)
    except BlockingIOError as error:
        file.close()
        raise JournalError(f"{path} is being written by another process; wait for it") from error
    except JournalError:
        file.close()
        raise
    file.truncate(path.read_bytes().rfind(b"\n") + 1)
    file.seek(0, os.SEEK_END)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return file, spans


def _line(span: Span) -> bytes:
    """The checksum is over the span's own bytes, exactly as they stand in the line."""
    try:
        data = orjson.dumps(span)
    except TypeError:  # a number of more than 64 bits, or half of a surrogate pair
        text = json.dumps(span, default=datetime.isoformat, separators=(",", ":"), allow_nan=False)
        data = text.encode()
    return OPENING % zlib.crc32(data) + data + CLOSING


def _intact(line: bytes) -> bool:
    data = _data(line)
    return line == OPENING % zlib.crc32(data) + data + CLOSING


def _held_a_span(tail: bytes) -> bool:
    """Whether a tail without a newline is a whole line and more: then it was not torn."""
    text = tail[len(OPENING % 0) :].decode("ascii", "replace")
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except ValueError:
        return False
    whole = len(OPENING % 0) + end + len(CLOSING)
    return len(tail) >= whole and _intact(tail[: whole - 1] + b"\n")


def _data(line: bytes) -> bytes:
    return line[len(OPENING % 0) : -len(CLOSING)]


def _span(line: bytes) -> Span:
    span: Span = json.loads(_data(line))
    times = {name: datetime.fromisoformat(span[name]) for name in TIMES if span.get(name)}
    return span | times
