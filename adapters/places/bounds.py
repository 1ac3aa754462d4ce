"""Bounds of a place: its bytes and files and, in a cage, the memory and the number of processes."""

import asyncio
import os
import stat
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from ratchet.adapters.errors import counted
from ratchet.adapters.places.place import Place, PlaceError
from ratchet.adapters.process.event_loop import cancel_and_wait
from ratchet.adapters.process.program import Program

LOOK_SECONDS = 0.2
"""Time between two looks at the processes of a cage."""

LONGEST_SHARE = 0.05
"""Share of the time for which a look at the files of a place may take a thread."""

LONG_PATH, MOST_OPENED = 900, 64
"""Characters of a path whose folder is opened, and the most that are open at a time."""

PROCESSES = Path("/proc")
PAGE = os.sysconf("SC_PAGE_SIZE")
MIB, BLOCK = 2**20, 512
"""Bytes, of a block as the system counts those of a file."""


class BeyondBounds(PlaceError):
    """An error for a place, or the processes in it, beyond what the recipe allows."""


def usage_of(folder: str, opened: int = 0) -> tuple[int, int]:
    """Return the bytes on disk and the files of a folder, without following links.

    What vanishes meanwhile does not count. The system reads no path beyond 4,096 bytes, so that one
    begins anew at a descriptor before it is that long; BeyondBounds beyond MOST_OPENED of them.
    """
    size = files = 0
    left = [folder]
    while left:
        with suppress(OSError), os.scandir(left.pop()) as entries:
            for entry in entries:
                files += 1
                with suppress(OSError):
                    size += entry.stat(follow_symlinks=False).st_blocks * BLOCK
                    if entry.is_dir(follow_symlinks=False) and len(entry.path) < LONG_PATH:
                        left.append(entry.path)
                    elif entry.is_dir(follow_symlinks=False):
                        below = _usage_below(entry.path, opened)
                        size, files = size + below[0], files + below[1]
    return size, files


def _usage_below(path: str, opened: int) -> tuple[int, int]:
    if opened == MOST_OPENED:
        raise BeyondBounds(
            f"the place holds a folder in {opened * LONG_PATH:,} characters of others, which is "
            "deeper than it is counted; look at what the program writes"
        )
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        return usage_of(f"/proc/self/fd/{descriptor}", opened + 1)
    finally:
        os.close(descriptor)


def check_files(place: Place, program: Program) -> None:
    """Raise BeyondBounds if a place, with what its program has open, holds more than it may."""
    size, files = usage_of(str(place.folder))
    size += sum(nameless_of([*descendants_of(program.pid)]).values())
    if size > place.settings.most_mib * MIB:
        fact = f"the place holds {size >> 20} MiB, and may hold"
        raise BeyondBounds(_told(place, fact, "writes", "most_mib"))
    if files > place.settings.most_files:
        fact = f"the place holds {counted(files, 'file')}, and may hold"
        raise BeyondBounds(_told(place, fact, "writes", "most_files"))


def check_processes(place: Place, program: Program) -> None:
    """Raise BeyondBounds if the processes of a program are more, or use more, than they may."""
    number = memory = 0
    for pid, threads in descendants_of(program.pid):
        number += threads
        with suppress(OSError, ValueError, IndexError):
            memory += PAGE * int((PROCESSES / f"{pid}/statm").read_bytes().split()[1])
    if number > place.settings.most_processes:
        fact = f"the program has {number} processes and threads, and may have"
        raise BeyondBounds(_told(place, fact, "starts", "most_processes"))
    if memory > place.settings.most_memory_mib * MIB:
        fact = f"the program uses {memory >> 20} MiB of memory, and may use"
        raise BeyondBounds(_told(place, fact, "loads", "most_memory_mib"))


def _told(place: Place, fact: str, does: str, key: str) -> str:
    most = getattr(place.settings, key)
    return f"{fact} {most}; look at what the program {does}, or give a larger place.{key}"


def descendants_of(pid: int) -> Iterator[tuple[int, int]]:
    """Yield the descendants of a process, each with its number of threads."""
    children = defaultdict[int, list[tuple[int, int]]](list)
    for entry in os.scandir(PROCESSES) if PROCESSES.is_dir() else ():
        if entry.name.isdecimal():
            with suppress(OSError, ValueError, IndexError):
                told = (PROCESSES / entry.name / "stat").read_bytes()
                fields = told.rpartition(b")")[2].split()
                children[int(fields[1])].append((int(entry.name), int(fields[17])))
    left = [pid]
    while left:
        for child in children[left.pop()]:
            left.append(child[0])
            yield child


def nameless_of(processes: list[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """Return the bytes of files that processes have open and that no folder shows, in memory too.

    No look finds what a process has sent to a socket, or has mapped and closed.
    """
    found = dict[tuple[int, int], int]()
    for pid, _ in processes:
        with suppress(OSError):
            for entry in os.scandir(PROCESSES / f"{pid}/fd"):
                with suppress(OSError):
                    told = entry.stat()
                    if stat.S_ISREG(told.st_mode) and not told.st_nlink:
                        found[told.st_dev, told.st_ino] = told.st_blocks * BLOCK
    return found


@asynccontextmanager
async def held_to_bounds(place: Place, program: Program) -> AsyncIterator[None]:
    """Kill a program that goes beyond the bounds of its place, and then raise BeyondBounds."""
    files, processes = (partial(one, place, program) for one in (check_files, check_processes))
    watching = [asyncio.create_task(_watch(files, 1.0, LONGEST_SHARE))]
    if place.settings.caged:
        watching.append(asyncio.create_task(_watch(processes, LOOK_SECONDS, 1.0)))
    for task in watching:
        task.add_done_callback(lambda task: task.cancelled() or program.kill())
    try:
        yield
    finally:
        await cancel_and_wait(*(task for task in watching if not task.done()))
    for task in watching:
        if not task.cancelled():
            await task


async def _watch(check: Callable[[], None], seconds: float, share: float) -> None:
    """Check again and again, after `seconds` or more, so that it takes a share of the time."""
    while True:
        began = time.monotonic()
        await asyncio.to_thread(check)
        await asyncio.sleep(max(seconds, (time.monotonic() - began) / share))
