"""Files that appear whole or not at all: a file that exists is a stage that is done."""

import errno
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

RESERVE_BYTES = 2**24
"""With less free on its disk, a file is not begun: the run waits for space."""

FULL = {errno.ENOSPC, errno.EDQUOT}
LOOK_SECONDS = 1.0

log = logging.getLogger(__name__)


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """Yield a neighbour to write to; on a clean exit it becomes `path`, durably.

    The neighbour's name is hidden and ends in `.partial`, so that no reader's glob finds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    wait_for_space(path.parent)
    aside = path.with_name(f".{path.name}.{uuid4().hex[:8]}.partial")
    try:
        yield aside
        _sync(aside)
        aside.replace(path)
        _sync(path.parent)
    finally:
        aside.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> Path:
    """`path`, holding `text`, whole."""
    with appearing(path) as aside:
        aside.write_text(text, encoding="utf-8")
    return path


def append_line(path: Path, line: str) -> None:
    """Add one line durably: it is on disk when this returns.

    What a write that was cut off has left after the last whole line is removed first.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    wait_for_space(path.parent)
    path.touch()
    with path.open("r+b") as file:
        whole = file.read().rfind(b"\n") + 1
        file.truncate(whole)
        file.seek(whole)
        file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path) -> list[str]:
    """The whole lines of a file that `append_line` wrote; none if it is not there."""
    if not path.exists():
        return []
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def wait_for_space(folder: Path) -> None:
    """Return when the folder's disk has RESERVE_BYTES free, and say once that it is waited for."""
    told = False
    while (free := shutil.disk_usage(folder).free) < RESERVE_BYTES:
        if not told:
            needed = RESERVE_BYTES // 2**20
            text = "the disk of %s is full (%d MiB are free): the run waits until there are %d"
            log.warning(text, folder, free // 2**20, needed)
        told = True
        time.sleep(LOOK_SECONDS)


def is_full(error: BaseException) -> bool:
    """Whether it was raised because there is no space."""
    return isinstance(error, OSError) and error.errno in FULL


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
