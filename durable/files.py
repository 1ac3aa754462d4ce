"""Files and folders that appear on disk whole or not at all, checksums, locks, and growing logs."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import file_digest, sha256
from pathlib import Path
from typing import IO
from uuid import uuid4

PARTIAL = ".partial"
"""End of the name of a file or folder that is being written."""

SEAL_END = b"}\n"
SEAL = b'{"sha256": "%s", "record": %s' + SEAL_END
"""A sealed record: the SHA-256 of its bytes, and the bytes."""


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; on a clean exit the file becomes `path`, durably.

    Readers see the old file or the new one. The temporary name is hidden and ends in PARTIAL, so
    that no reader's glob finds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{uuid4().hex[:8]}{PARTIAL}")
    try:
        yield aside
        sync(aside)
        aside.replace(path)
        sync(path.parent)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def appearing_folder(path: Path, writer: str = "") -> Iterator[Path]:
    """Yield an empty hidden folder; on a clean exit it becomes `path`, durably.

    `writer` tells apart processes that may write the folder at the same time; without it, what a
    killed process left is removed.
    """
    aside = path.with_name(f".{path.name}{writer}{PARTIAL}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        for written in (*aside.rglob("*"), aside):
            sync(written)
        aside.replace(path)
        sync(path.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, durably."""
    with appearing(path) as aside:
        aside.write_bytes(content)


def remove(path: Path) -> None:
    """Remove what is at a path, whatever it is: a file, a folder, a link, or nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def link_or_copy(source: Path, target: Path) -> None:
    """Share a file between two folders by a hard link, or copy it where links are impossible."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_file(file: IO[str] | IO[bytes], *, shared: bool = False, wait: bool = False) -> bool:
    """Lock a file until it is closed or this process ends; return False if another process has it.

    With `wait` that process's end is waited for.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(file, kind if wait else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def sha256_of(path: Path) -> str | None:
    """Return the digest of a file; None if no file can be read there."""
    try:
        with path.open("rb") as file:
            return file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def sealed(record: bytes) -> bytes:
    """Return the bytes of a file that holds a record and its checksum."""
    return SEAL % (sha256(record).hexdigest().encode(), record)


def unsealed(data: bytes) -> bytes:
    """Return the record of a sealed file; ValueError if the file is not as it was written."""
    start = len(SEAL % (b"0" * 64, b"")) - len(SEAL_END)
    record = data[start : -len(SEAL_END)]
    if data != sealed(record):
        raise ValueError(f"its checksum does not fit its {len(data)} bytes")
    return record


@dataclass(frozen=True)
class Appended:
    """Whole lines that were appended since the last look, without their ends, and a torn one.

    If the file was begun `anew`, they are all its lines.
    """

    lines: list[bytes]
    torn: bytes
    anew: bool


class Tail:
    """Reader of the lines that were appended to a file since its last look.

    A file that was replaced, cut, or changed without growing is read again from its beginning; so
    is one whose line before the appended lines is not the line that was read last. A change of an
    earlier line is not seen if the file has grown since the last look. A torn line is read when it
    is whole. A look opens the file: only then are other hosts' writes seen on a network.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.forget()

    def forget(self) -> None:
        """Have the next look read the whole file."""
        self._offset = 0
        self._last = b""
        self._seen: os.stat_result | None = None

    def read(self) -> Appended:
        """Return what was appended; a file that is not there has no lines."""
        try:
            file = self.path.open("rb", buffering=0)
        except FileNotFoundError:
            known, _ = self._offset, self.forget()
            return Appended([], b"", anew=known > 0)
        with file:
            found = os.fstat(file.fileno())
            if anew := not self._goes_on(file, found):
                self.forget()
            file.seek(self._offset)
            *lines, torn = file.read().split(b"\n")
        if lines:
            self._last = lines[-1] + b"\n"
            self._offset += sum(map(len, lines)) + len(lines)
        self._seen = found
        return Appended(lines, torn, anew)

    def _goes_on(self, file: IO[bytes], found: os.stat_result) -> bool:
        """Return whether the file still begins with the lines that were read."""
        seen = self._seen
        if seen is None:
            return True
        if (found.st_dev, found.st_ino) != (seen.st_dev, seen.st_ino):
            return False
        if found.st_size == seen.st_size and found.st_mtime_ns != seen.st_mtime_ns:
            return False
        file.seek(self._offset - len(self._last))
        return file.read(len(self._last)) == self._last
