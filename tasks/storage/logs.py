"""Logs of a run: they grow by whole lines, are read once, and are then followed.

Each line carries a CRC-32 of its other bytes, which other readers ignore. The torn end of an
interrupted write does not count, and the next line replaces it.
"""

import json
import os
import zlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from threading import RLock
from typing import Generic, Protocol, TypeVar

from ratchet.durable.files import Tail
from ratchet.tasks.storage.files import Damaged, JsonRow, remedy, wait_for_space

LINE_SEAL = "crc32"
LINE_BLANK = "0" * 8

MOST_LOGS = 10_000
"""Logs that are followed at the same time."""


class Rows(Protocol):
    """Contents of a log, which is read row by row."""

    def append(self, row: JsonRow, /) -> None:
        """Take in the next row."""


R = TypeVar("R", bound=Rows)
T = TypeVar("T")


class FollowedLog(Generic[R]):
    """A log whose readers read only what was appended since they read last.

    `make` makes what is known of an empty log. A log that was cut or replaced is read anew. Every
    look at a damaged log raises Damaged, and so does a row that is appended to one: a damaged end
    would be taken for a torn one, and cut.
    """

    def __init__(self, path: Path, make: Callable[[], R]) -> None:
        self.path = path
        self._make, self._known, self._lines = make, make(), 0
        self._tail = Tail(path)
        self._lock = RLock()

    def ask(self, question: Callable[[R], T]) -> T:
        """Return what a question finds in all that the log has; other threads wait meanwhile."""
        with self._lock:
            self._read_on()
            return question(self._known)

    def append(self, row: Mapping[str, object], *, synced: bool = True) -> None:
        """Append a row durably: its line is on disk when this returns.

        A line that is not `synced` is lost if the machine crashes, but not if this process does.
        """
        line = line_of(row)
        wait_for_space(self.path.parent)  # those who look do not wait for it
        with self._lock:
            torn = self._read_on()
            _write_on(self.path, line, torn, synced=synced)

    def _read_on(self) -> int:
        """Take in the rows that were appended; return the length of the torn end."""
        try:
            appended = self._tail.read()
            if appended.anew:
                self._known, self._lines = self._make(), 0
            lines = [*appended.lines]
            if _is_intact(appended.torn[:-1]):  # a whole line whose end has changed
                lines.append(appended.torn)
            for line in lines:
                self._known.append(self._row(line))
                self._lines += 1
        except BaseException:
            self._tail.forget()
            self._known, self._lines = self._make(), 0
            raise
        return len(appended.torn)

    def _row(self, line: bytes) -> JsonRow:
        if not _is_intact(line):
            raise Damaged(
                f"line {self._lines + 1} of {self.path} is damaged: its checksum does not fit. "
                f"{remedy(self.path)}"
            )
        row: JsonRow = json.loads(line)
        del row[LINE_SEAL]
        return row


def follow(path: Path, make: Callable[[], R]) -> FollowedLog[R]:
    """Return the log at a path, which all of this process follow together."""
    return _follow(path.absolute(), make)


@lru_cache(MOST_LOGS)
def _follow(path: Path, make: Callable[[], R]) -> FollowedLog[R]:
    return FollowedLog(path, make)


def read_log(path: Path) -> list[JsonRow]:
    """Read the whole lines of a log, [] if there is no file; Damaged if a line has changed."""
    return FollowedLog(path, list[JsonRow]).ask(list[JsonRow])


def append_row(path: Path, row: Mapping[str, object]) -> None:
    """Append a row to a log that nothing follows, as `FollowedLog.append` does."""
    FollowedLog(path, list[JsonRow]).append(row)


def _write_on(path: Path, line: bytes, torn: int, *, synced: bool) -> None:
    """Write a line to the end of a file, in place of its torn bytes."""
    with path.open("ab") as file:
        if torn:
            file.truncate(file.tell() - torn)
        file.write(line)
        file.flush()
        if synced:
            os.fsync(file.fileno())


def line_of(row: Mapping[str, object]) -> bytes:
    line = json.dumps({**row, LINE_SEAL: LINE_BLANK}, allow_nan=False)
    return _with_crc(line.encode()) + b"\n"


def _is_intact(line: bytes) -> bool:
    return line == _with_crc(line)


def _with_crc(line: bytes) -> bytes:
    begin = line[: -len(LINE_BLANK + '"}')]
    crc = zlib.crc32(begin + f'{LINE_BLANK}"}}'.encode())
    return begin + f'{crc:08x}"}}'.encode()
