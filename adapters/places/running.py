"""Programs that run in a place, within its bounds and, if the recipe says so, in a cage."""

import os
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from signal import SIGKILL

from ratchet.adapters.clients.current_rollout import Roles
from ratchet.adapters.places.bounds import BLOCK, PROCESSES, held_to_bounds
from ratchet.adapters.places.cage import caged, has_begun
from ratchet.adapters.places.place import Place
from ratchet.adapters.process.program import Program, running_program

MARKED_END = """trap ': > "$0"' EXIT; shopt -s execfail 2>/dev/null"""
LIMITED = ("/bin/sh", "-c", f'{MARKED_END}; ulimit -f "$1" && shift && exec "$@"')
"""Words before a file, the most blocks of a file, and a program's own words.

The first file is made if the program cannot be started: any exit status may be the program's own.
Without execfail, which other shells do not know, bash would not come to its trap.
"""

NOT_STARTED = "not-started"
"""Name of that file in a place."""


@asynccontextmanager
async def program_in(
    place: Place,
    words: Sequence[str],
    variables: Mapping[str, str],
    line: str,
    roles: Roles,
    inherited: Collection[int] = (),
) -> AsyncIterator[Program]:
    """Start a program in a place, with `line` on its stdin; the program ends with the block.

    It reaches the door of `roles`. Raises BeyondBounds if it goes beyond the bounds of the place.
    `began` is known after the block, which waits for its end. `inherited` are descriptors of a
    program without a cage.
    """
    if place.settings.caged:
        async with caged(place, words, roles) as (in_cage, ours, theirs):
            started = running_program(in_cage, variables, line, inherited=(theirs.fileno(),))
            async with started as program, held_to_bounds(place, program):
                yield program
                program.began = has_begun(ours)
        return
    blocks, mark = str(place.settings.bounds.most_bytes // BLOCK), place.folder / NOT_STARTED
    limited = [*LIMITED, str(mark), blocks, *words]
    started = running_program(limited, variables, line, folder=place.work, inherited=inherited)
    try:
        async with started as program, held_to_bounds(place, program):
            yield program
            program.began = not mark.exists()
    finally:
        _end_strays(variables["HOME"])


def _end_strays(home: str) -> None:
    """Kill what has left a program's process group and still has its HOME.

    A process in a cage cannot outlive it.
    """
    mark = b"\0HOME=" + os.fsencode(home) + b"\0"
    with suppress(FileNotFoundError):  # a system without /proc
        for entry in os.scandir(PROCESSES):
            if entry.name.isdecimal():
                with suppress(OSError):
                    if mark in b"\0" + Path(entry.path, "environ").read_bytes():
                        os.kill(int(entry.name), SIGKILL)
