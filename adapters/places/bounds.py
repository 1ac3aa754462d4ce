"""Bounds of a place: its bytes and files and, in a cage, the memory and the number of processes."""

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from ratchet.adapters.errors import counted
from ratchet.adapters.places.place import Place, PlaceError
from ratchet.adapters.process.event_loop import cancel_and_wait
from ratchet.adapters.process.program import Program

LOOK_SECONDS = 0.2
"""Time between two looks at the processes of a cage."""

LONGEST_SHARE = 0.05
"""Share of the time for which a look at the files of a place may take a thread."""

PROCESSES = Path("/proc")
PAGE = os.sysconf("SC_PAGE_SIZE")
BLOCK = 512
"""Bytes of a block, as the system counts those of a file."""


class BeyondBounds(PlaceError):
    """An error for a place, or the processes in it, beyond what the recipe allows."""


def usage_of(folder: Path) -> tuple[int, int]:
    """Return the bytes on disk and the files of a folder, without following links.

    What vanishes meanwhile does not count.
    """
    size = files = 0
    left = [str(folder)]
    while left:
        with suppress(OSError), os.scandir(left.pop()) as entries:
            for entry in entries:
                files += 1
                with suppress(OSError):
                    size += entry.stat(follow_symlinks=False).st_blocks * BLOCK
                    if entry.is_dir(follow_symlinks=False):
                        left.append(entry.path)
    return size, files


def check_files(place: Place) -> None:
    """Raise BeyondBounds if a place holds more than it may."""
    bounds, (size, files) = place.settings.bounds, usage_of(place.folder)
    if size > bounds.most_bytes:
        raise BeyondBounds(
            f"the place holds {size >> 20} MiB, and may hold {bounds.most_bytes >> 20}; "
            "look at what the program writes, or give a larger place.most_mib"
        )
    if files > bounds.most_files:
        raise BeyondBounds(
            f"the place holds {counted(files, 'file')}, and may hold {bounds.most_files}; "
            "look at what the program writes, or give a larger place.most_files"
        )


def check_processes(place: Place, program: Program) -> None:
    """Raise BeyondBounds if the processes of a program are more, or use more, than they may."""
    bounds = place.settings.bounds
    number, memory = processes_of(program.pid)
    if number > bounds.most_processes:
        raise BeyondBounds(
            f"the program has {number} processes, and may have {bounds.most_processes}; look at "
            "what it starts, or give a larger place.most_processes"
        )
    if memory > bounds.most_memory:
        raise BeyondBounds(
            f"the program uses {memory >> 20} MiB of memory, and may use "
            f"{bounds.most_memory >> 20}; look at what it loads, or give a larger "
            "place.most_memory_mib"
        )


def processes_of(pid: int) -> tuple[int, int]:
    """Count the descendants of a process, and the bytes of memory that they use."""
    children = defaultdict[int, list[int]](list)
    for entry in os.scandir(PROCESSES):
        if entry.name.isdecimal():
            with suppress(OSError, ValueError, IndexError):
                stat = (PROCESSES / entry.name / "stat").read_bytes()
                children[int(stat.rpartition(b")")[2].split()[1])].append(int(entry.name))
    number = memory = 0
    left = [pid]
    while left:
        for child in children[left.pop()]:
            left.append(child)
            number += 1
            with suppress(OSError, ValueError, IndexError):
                memory += PAGE * int((PROCESSES / f"{child}/statm").read_bytes().split()[1])
    return number, memory


@asynccontextmanager
async def held_to_bounds(place: Place, program: Program) -> AsyncIterator[None]:
    """Kill a program that goes beyond the bounds of its place, and then raise BeyondBounds.

    The place is looked at once more after the block.
    """
    watching = [asyncio.create_task(_watch_files(place))]
    if place.settings.caged:
        watching.append(asyncio.create_task(_watch_processes(place, program)))
    for task in watching:
        task.add_done_callback(lambda task: task.cancelled() or program.kill())
    try:
        yield
    finally:
        await cancel_and_wait(*(task for task in watching if not task.done()))
    for task in watching:
        if not task.cancelled():
            await task
    await asyncio.to_thread(check_files, place)


async def _watch_files(place: Place) -> None:
    while True:
        began = time.monotonic()
        await asyncio.to_thread(check_files, place)
        took = time.monotonic() - began
        await asyncio.sleep(max(1.0, took / LONGEST_SHARE))


async def _watch_processes(place: Place, program: Program) -> None:
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        check_processes(place, program)
