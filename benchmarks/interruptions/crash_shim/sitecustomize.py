"""Crashes this process once at each of its writes to a run; Python imports it at its start.

A folder on PYTHONPATH that holds this file is enough. Every fsync and rename below CRASH_RUN is a
window, with a name that it has again when a continued run comes to the same write. At the first
window that CRASH_CROSSED does not list, the process adds it to that file and dies by SIGKILL:
`before` the call, `after` it, or with the write `torn`: of a file that is not synced, half is lost,
and of a folder that is not synced, the last rename is.
"""

import json
import os
import re
import signal
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn

RUN = os.environ.get("CRASH_RUN", "")
CROSSED = os.environ.get("CRASH_CROSSED", "")
SHARE = os.environ.get("CRASH_SHARE", "0/1")
"""Which windows are meant: those whose hash, modulo the second number, is the first."""

RANDOM = re.compile(r"-\d+-[0-9a-f]{6}\b|[0-9a-f]{8}(-?[0-9a-f]{4}){3}-?[0-9a-f]{12}|[0-9a-f]{6,}")
"""Parts of a path that differ between two starts: of an owner, a session or a temporary file."""
TOLD_BY = ("step", "phase", "kind", "rollout_id", "role", "call")
"""Keys of a log's line that name it."""

fsync, replace = os.fsync, os.replace
undo: dict[Path, tuple[Path, Path, Path | None]] = {}
"""Folder → the target and source of its last rename, and a copy of what the target was before."""


def _crash_in_fsync(descriptor: int) -> None:
    path = Path(f"/proc/self/fd/{descriptor}").readlink()
    torn = path in undo if path.is_dir() else path.stat().st_size > 1
    how = _window("fsync", path, torn=torn)
    if how == "before":
        _die()
    if how == "torn":
        _tear(path)
        _die()
    fsync(descriptor)
    if how == "after":
        _die()


def _crash_in_rename(source: Any, target: Any, **options: Any) -> None:
    path = Path(target).absolute()
    how = _window("rename", path, torn=False)
    if how == "before":
        _die()
    if _is_ours(path):
        before = None
        if path.is_file():
            name = sha256(str(path).encode()).hexdigest()[:16]
            before = Path(f"{CROSSED}.{os.getpid()}.{name}")
            before.unlink(missing_ok=True)
            before.hardlink_to(path)
        undo[path.parent] = (path, Path(source).absolute(), before)
    replace(source, target, **options)
    if how == "after":
        _die()


def _window(call: str, path: Path, *, torn: bool) -> str | None:
    """Return how to crash at this call; None if all of its windows are crossed."""
    if not _is_ours(path):
        return None
    renamed = f" {undo[path][0].name}" if path in undo else ""
    name = RANDOM.sub("*", f"{path.relative_to(RUN)}{_line_of(path)}{renamed}")
    part, parts = map(int, SHARE.split("/"))
    for how in ("torn", "before", "after") if torn else ("before", "after"):
        window = f"{how} {call} {name}"
        digest = int(sha256(window.encode()).hexdigest()[:8], 16)
        with Path(CROSSED).open("a+", encoding="utf-8") as crossed:
            crossed.seek(0)
            if digest % parts == part and f"{window}\n" not in crossed.readlines():
                crossed.write(f"{window}\n")
                return how
    return None


def _line_of(path: Path) -> str:
    """Name the last line of a log."""
    if path.suffix != ".jsonl" or not path.exists():
        return ""
    try:
        line = json.loads(path.read_bytes().rstrip(b"\n").rpartition(b"\n")[2])
    except ValueError:
        return ""
    return " ".join(["", *(f"{key}={line[key]}" for key in TOLD_BY if line.get(key) is not None)])


def _tear(path: Path) -> None:
    if path in undo:
        target, source, before = undo[path]
        replace(target, source)
        if before is not None:
            target.hardlink_to(before)
        return
    with path.open("rb+") as file:
        data = file.read()
        kept = data.rfind(b"\n", 0, len(data) - 1) + 1 if path.suffix == ".jsonl" else 0
        file.truncate((kept + len(data)) // 2)


def _is_ours(path: Path) -> bool:
    return path.is_relative_to(RUN)


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a process outlived SIGKILL")


if RUN:
    os.fsync = _crash_in_fsync
    os.replace = os.rename = _crash_in_rename
