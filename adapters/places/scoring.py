"""The reward of a place: a command that runs there after the program's end, with hidden files.

Its answer is the share of passed tests of a report, its last line's JSON, or its status.
"""

import asyncio
import ctypes
import json
import logging
import os
import shlex
import shutil
import stat
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from xml.parsers import expat

from ratchet.adapters.places.bounds import BeyondBounds
from ratchet.adapters.places.cage import program_in
from ratchet.adapters.places.filling import lay_tests
from ratchet.adapters.places.place import Place, PlaceError
from ratchet.adapters.process.program import Program
from ratchet.adapters.rewards import Reward, read_reward

REPORT = "REPORT"
"""Variable of the reward command: the file for a report of tests in JUnit's XML."""

MOST_REPORT = 16 * 2**20
"""Bytes of a report; the program's own code may write a longer one."""

NOT_PASSED = {"failure", "error", "skipped"}
"""Elements of a test case of JUnit that did not pass."""

ENDED = range(128)
"""Exit statuses of a command that no signal has ended, as a shell says it."""

APPLY = ("git", "apply", "--whitespace=nowarn", "-")
ALONE = {"GIT_DIR": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "GIT_ATTR_NOSYSTEM": "1"}
"""Variables of a git that reads no repository, of the place or above it, and no settings."""

MODIFIED, ATTRIBUTES, WRITTEN, OPENED, MOVED_HERE, MADE = 0x2, 0x4, 0x8, 0x20, 0x80, 0x100
HAPPENED = MODIFIED | ATTRIBUTES | WRITTEN | OPENED | MOVED_HERE | MADE | 0xE40
"""What Linux's inotify tells of a folder's files: also that one, or the folder, is gone."""

log = logging.getLogger(__name__)


async def score(place: Place) -> Reward:
    """Run the reward command of a place; return its reward.

    Without a report and without JSON, an exit status of 0 is a reward of 1. Any other status is a
    reward of 0. So is a command that does not end in time, goes beyond the bounds of the place, or
    writes no report though its words name one, since the program's own code may be the cause, and a
    patch of tests that does not apply to what the program has made. PlaceError if the command
    cannot be started, RewardError if its answer is no reward.
    """
    for folder in (place.scored, place.report.parent):
        folder.mkdir()
    patch = await asyncio.to_thread(lay_tests, place)
    try:
        async with asyncio.timeout(place.settings.reward_seconds):
            if patch is not None:
                applied = await _run(place, APPLY, ALONE, patch)
                if applied.status != 0:
                    return _nothing(place, f"its tests do not apply: {applied.said([])}")
            with _watched(place.report.parent) as told:
                ended = await _run(place, shlex.split(place.settings.reward or ""), {})
    except TimeoutError:
        took = f"its command took longer than {place.settings.reward_seconds:g} s; look for what "
        return _nothing(place, f"{took}it waits for, or give a larger place.reward_seconds")
    except BeyondBounds as error:
        return _nothing(place, f"its command was ended: {error}")
    if place.report.is_symlink() or place.report.exists():
        passed = await asyncio.to_thread(_read_report, place.report)
        if passed and not (ended.status in ENDED and (told is None or _written_once(told))):
            return _nothing(place, "its report was not written once, by a command that has ended")
        return Reward(passed)
    if ended.status != 0 or REPORT in (place.settings.reward or ""):
        return Reward(0.0)
    answer = ended.stdout.last_line_json()
    return Reward(1.0) if answer is None else read_reward(answer)


def _nothing(place: Place, why: str) -> Reward:
    log.warning("the reward of %s is 0: %s", place.rollout_id, why)
    return Reward(0.0)


async def _run(
    place: Place, words: Sequence[str], more: Mapping[str, str], told: str | None = None
) -> Program:
    """Run a command in a place, with the example on its stdin unless it is told something else."""
    home, report = place.seen(place.scored), place.seen(place.report)
    variables = place.own_variables() | {"HOME": home, "TMPDIR": home, REPORT: report, **more}
    filled = [place.fill_in(word, variables, f"place.reward's {word!r}") for word in words]
    if os.sep not in filled[0] and shutil.which(filled[0]) is None:
        raise PlaceError(  # what it would score is not known
            f"there is no program {filled[0]!r} to run as place.reward; install it, or write its "
            "path"
        )
    line = json.dumps(place.example) if told is None else told
    async with program_in(place, filled, variables, line, {}) as program:
        await program.silent.wait()
    return program


@contextmanager
def _watched(folder: Path) -> Iterator[bytearray | None]:
    """Yield what inotify tells of a folder until the block ends; None where no system tells it."""
    if sys.platform != "linux":
        yield None
        return
    libc, loop, told = ctypes.CDLL(None), asyncio.get_running_loop(), bytearray()
    watch = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if watch < 0:
        raise PlaceError("no further folder can be watched; raise fs.inotify.max_user_instances")
    libc.inotify_add_watch(watch, os.fsencode(folder), HAPPENED)
    loop.add_reader(watch, lambda: told.extend(os.read(watch, 2**16)))
    try:
        yield told
    finally:
        loop.remove_reader(watch)
        with suppress(BlockingIOError):
            while more := os.read(watch, 2**16):
                told += more
        os.close(watch)


def _written_once(told: bytearray) -> bool:
    """Return whether nothing has happened but that one file was made and then written, or moved.

    The code that is tested can write where its tests report, before they do and after.
    """
    kinds, at = list[int](), 0
    while at < len(told):
        _, kind, _, length = struct.unpack_from("iIII", told, at)
        at += struct.calcsize("iIII") + length
        if not (kind & OPENED or (kind & ATTRIBUTES and length)):  # its own mode may be set
            kinds.append(kind)
    once = [kind for kind in kinds if kind != MODIFIED] in ([MADE, WRITTEN], [MOVED_HERE])
    return once and kinds[-1] != MODIFIED


def _read_report(path: Path) -> float:
    """Return the share of a report's tests that passed.

    A report that cannot be read has passed nothing: the program's own code may have written it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return 0.0
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return 0.0
        content = file.read(MOST_REPORT + 1)
    cases, within = list[bool](), list[str]()

    def begun(tag: str, _: object) -> None:
        if tag == "testcase":
            cases.append(True)
        elif tag in NOT_PASSED and within[-1:] == ["testcase"]:
            cases[-1] = False
        within.append(tag)

    def refuse(*_: object) -> None:
        raise ValueError("a report declares no entities, which may be endless")

    parser = expat.ParserCreate()
    parser.StartElementHandler, parser.EndElementHandler = begun, lambda _: within.pop()
    parser.StartDoctypeDeclHandler = refuse
    try:
        parser.Parse(content if len(content) <= MOST_REPORT else b"", True)
    except (expat.ExpatError, ValueError, LookupError):  # LookupError: an unknown encoding
        return 0.0
    return sum(cases) / len(cases) if cases else 0.0
