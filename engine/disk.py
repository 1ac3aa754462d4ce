"""Records, files and folders that appear on disk whole or not at all."""

import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import file_digest, sha256
from pathlib import Path
from typing import ClassVar, Generic, TypeVar
from uuid import uuid4

from pydantic import BaseModel

from engine.errors import NotFound, RequestRefused

PARTIAL = ".partial"

SEAL_END = b"}\n"
SEAL = b'{"sha256": "%s", "record": %s' + SEAL_END

log = logging.getLogger(__name__)


class StoredRecord(BaseModel):
    """A record on disk; `missing` is the error of one that is not there, and `{}` its key."""

    missing: ClassVar[str]


Record = TypeVar("Record", bound=StoredRecord)


class Records(Generic[Record]):
    """A folder of JSON records by key, read once and written through.

    A key may contain slashes. A record is durable when `put` returns. Reading and writing are safe
    between threads, because the index is one dict and each file is replaced atomically. A file
    carries the SHA-256 of its record; one that is damaged is left where it is, and counts as
    missing.
    """

    def __init__(self, folder: Path, of: type[Record]) -> None:
        self._folder = folder
        self._missing = of.missing
        self._records: dict[str, Record] = {}
        self.damaged: list[Path] = []
        for path in sorted(folder.rglob("*.json")):
            try:
                record = of.model_validate_json(_unsealed(path.read_bytes()))
            except (OSError, ValueError) as error:
                text = "%s is not the %s that was written (%s); it counts as missing"
                log.warning(text, path, of.__name__, error)
                self.damaged.append(path)
            else:
                self._records[str(path.relative_to(folder).with_suffix(""))] = record

    def __contains__(self, key: str) -> bool:
        return key in self._records

    def find(self, key: str) -> Record:
        """Return a record; raise NotFound if it is missing."""
        if key not in self._records:
            raise NotFound(self._missing.format(key))
        return self._records[key]

    def get(self, key: str) -> Record | None:
        return self._records.get(key)

    def values(self) -> list[Record]:
        return list(self._records.values())

    def put(self, key: str, record: Record) -> None:
        write_file(self._path(key), _sealed(record.model_dump_json().encode()))
        self._records[key] = record

    def remove(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)
        sync(self._path(key).parent)
        self._records.pop(key, None)

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.json"


def _sealed(record: bytes) -> bytes:
    return SEAL % (sha256(record).hexdigest().encode(), record)


def _unsealed(data: bytes) -> bytes:
    """Return the record of a file; ValueError if the file is not as it was written."""
    start = len(SEAL % (b"0" * 64, b"")) - len(SEAL_END)
    record = data[start : -len(SEAL_END)]
    if data != _sealed(record):
        raise ValueError(f"its checksum does not fit its {len(data)} bytes")
    return record


def sha256_of(path: Path) -> str | None:
    """Return the digest of a file; None if no file can be read there."""
    try:
        with path.open("rb") as file:
            return file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def write_file(path: Path, content: bytes) -> None:
    """Write a file durably; readers see the old file or the new one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{uuid4().hex[:8]}{PARTIAL}")
    try:
        aside.write_bytes(content)
        sync(aside)
        aside.replace(path)
        sync(path.parent)
    finally:
        aside.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Remove whatever is at a path: a folder with its files, a file, a link, or nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty temporary folder; on a clean exit it becomes `folder`, durably."""
    aside = folder.with_name(f".{folder.name}{PARTIAL}")
    shutil.rmtree(aside, ignore_errors=True)  # of a process that was killed
    aside.mkdir(parents=True)
    try:
        yield aside
        for path in aside.rglob("*"):
            sync(path)
        sync(aside)
        aside.replace(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def lock_state(state: Path, patience_seconds: float = 10.0) -> Iterator[None]:
    """Hold the lock of the state folder, because a second engine would not see our writes.

    Wait for the lock a little, because the engine of a killed run takes a moment to exit.
    """
    try:
        state.mkdir(parents=True, exist_ok=True)
        lock = (state / "lock").open("w")
    except OSError as error:
        raise RequestRefused(
            f"cannot keep state in {state}: {error}; give --state a folder"
        ) from error
    with lock:
        deadline = time.monotonic() + patience_seconds
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise RequestRefused(
                        f"another engine uses the state folder {state}; stop it, "
                        "or give --state another folder"
                    ) from error
            time.sleep(0.05)
        yield
