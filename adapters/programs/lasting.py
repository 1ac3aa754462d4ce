"""Programs that are started once in this process, and serve many rollouts.

They outlive the event loops of batches, so they have a loop of their own.
"""

import asyncio
import atexit
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock, Thread
from typing import Generic, TypeVar

from ratchet.adapters.process.event_loop import RunningLoop
from ratchet.adapters.process.program import Program

T = TypeVar("T")
ProgramT = TypeVar("ProgramT", bound=Program)


@dataclass(frozen=True)
class LastingCommand:
    """A program's command line, folder and environment; equal commands share a program."""

    line: str
    words: tuple[str, ...]
    folder: Path
    variables: tuple[tuple[str, str], ...]


@cache
def _start_loop() -> asyncio.AbstractEventLoop:
    loop = RunningLoop()
    Thread(target=loop.run_forever, name="lasting programs", daemon=True).start()
    return loop


_starting_loop = Lock()


async def on_lasting_loop(work: Coroutine[None, None, T]) -> T:
    """Await work on the event loop of the programs that outlive the loops of batches."""
    with _starting_loop:  # several batches begin at once, each in a thread
        loop = _start_loop()
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


_running: dict[LastingCommand, Program] = {}


class LastingPrograms(Generic[ProgramT]):
    """The programs of one kind that run, by their commands."""

    def __init__(self, start: Callable[[LastingCommand], Awaitable[ProgramT]]) -> None:
        self._start = start
        self._programs: dict[LastingCommand, ProgramT] = {}
        self._starting = asyncio.Lock()

    async def running(self, command: LastingCommand) -> ProgramT:
        """Return the process of a command; start it if it does not run."""
        async with self._starting:
            process = self._programs.get(command)
            if process is None or process.exited.is_set():
                process = await self._start(command)
                self._programs[command] = _running[command] = process
        return process


@atexit.register
def kill_programs() -> None:
    for process in _running.values():
        if not process.exited.is_set():
            process.kill()
