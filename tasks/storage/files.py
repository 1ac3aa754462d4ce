"""Files that appear whole or not at all: a file that exists is a stage that is done.

All reads and writes of a run's files go through this folder (`tasks/storage`) and the journal.
"""

import errno
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TypeAlias
from uuid import uuid4

from adapters.errors import UserError
from durable import files

RESERVE_BYTES = 2**24
"""Free space that a disk must have before a file is begun; with less, the run waits."""

FULL = {errno.ENOSPC, errno.EDQUOT}
LOOK_SECONDS = 1.0

FileVersions: TypeAlias = tuple[tuple[int, int] | None, ...]
"""Time of the last change and size of each file; None of one that is not there."""

log = logging.getLogger(__name__)


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """Yield a path to write to, as `durable.files` does, once the disk has space for it."""
    wait_for_space(path.parent)
    with files.appearing(path) as aside:
        yield aside


@contextmanager
def appearing_folder(path: Path) -> Iterator[Path]:
    """Yield an empty hidden folder; on a clean exit it becomes `path`, durably.

    UserError if `path` is there, or if the disk has no space for what is written.
    """
    check_absent(path)
    check_output(path, "another folder")
    try:
        with files.appearing_folder(path, f".{uuid4().hex[:8]}") as aside:
            yield aside
            check_absent(path)
    except OSError as error:
        if not is_full(error):
            raise
        raise UserError(
            f"the disk of {path.parent} is full, and nothing is left of {path.name}; make space, "
            "or give another folder"
        ) from error


def check_absent(path: Path) -> None:
    """Refuse (UserError) a place where something is, which would be written over."""
    if os.path.lexists(path):
        raise UserError(f"{path} exists, and is not written over; give another folder")


def write_text(path: Path, text: str) -> Path:
    """Write `text` to `path`, whole or not at all; return the path."""
    return write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> Path:
    """Write `data` to `path`, whole or not at all; return the path."""
    with appearing(path) as aside:
        aside.write_bytes(data)
    return path


def read_bytes(path: Path) -> bytes:
    """Read a file of a run."""
    return path.read_bytes()


def remove_folder(path: Path) -> None:
    """Remove a folder with its files, as far as it is there."""
    shutil.rmtree(path, ignore_errors=True)


def is_written(path: Path) -> bool:
    """Return whether a file is there, and so whether its stage is done."""
    return path.exists()


def is_file(path: Path) -> bool:
    """Return whether a file is there, and neither a folder nor a link to nothing."""
    return path.is_file()


def version_of(paths: Iterable[Path]) -> FileVersions:
    """Return what changes when a file does, or when one appears in a folder."""
    return tuple(_version(path) for path in paths)


def append_line(path: Path, line: str) -> None:
    """Append one line durably: the line is on disk when this returns.

    The torn end of an interrupted write is removed first.
    """
    wait_for_space(path.parent)
    path.touch()
    with path.open("r+b") as file:
        whole = file.read().rfind(b"\n") + 1
        file.truncate(whole)
        file.seek(whole)
        file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def write_note(file: IO[str], text: str) -> None:
    """Write what is left out where the disk is full, such as who holds a lock."""
    try:
        os.write(file.fileno(), text.encode())
    except OSError as error:
        if not is_full(error):
            raise


def wait_for_space(folder: Path) -> None:
    """Wait until the disk of a folder, which is made, has RESERVE_BYTES free; log the wait once."""
    folder.mkdir(parents=True, exist_ok=True)
    told = False
    while (free := shutil.disk_usage(folder).free) < RESERVE_BYTES:
        if not told:
            needed = RESERVE_BYTES // 2**20
            text = "the disk of %s is full (%d MiB are free): the run waits until there are %d"
            log.warning(text, folder, free // 2**20, needed)
        told = True
        time.sleep(LOOK_SECONDS)


def check_writable(path: Path, instead: str) -> None:
    """Refuse (UserError) a folder, or what is not there yet, that cannot be written; leave nothing.

    `instead` names what the user can give in its place.
    """
    whole = path.absolute()
    there = next(above for above in (whole, *whole.parents) if os.path.lexists(above))
    try:
        TemporaryFile(dir=there).close()
        for name in whole.relative_to(there).parts:
            with suppress(FileNotFoundError):
                (there / name).lstat()  # OSError if the name is too long
    except OSError as error:
        raise UserError(
            f"nothing can be written at {path} ({error.strerror}); mend that, or give {instead}"
        ) from error


def check_output(file: Path, instead: str) -> None:
    """Refuse (UserError) a file that no command can write, or that the disk has no space for."""
    check_writable(file.parent if os.path.lexists(file) else file, instead)
    if file.is_dir():
        raise UserError(f"{file} is a folder, and a file is to be written; give {instead}")
    there = next(path for path in file.absolute().parents if path.exists())
    if (free := shutil.disk_usage(there).free) < RESERVE_BYTES:
        raise UserError(
            f"the disk of {there} is full ({free // 2**20} MiB are free, and "
            f"{RESERVE_BYTES // 2**20} are needed); make space, or give {instead}"
        )


def is_full(error: BaseException) -> bool:
    """Return whether the error says that the disk has no space left."""
    return isinstance(error, OSError) and error.errno in FULL


def _version(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size
