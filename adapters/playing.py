"""A process of `adapters.processes`: it plays rollouts while the one that started it lives."""

import asyncio
import json
import os
import sys
from functools import partial
from threading import Thread
from typing import IO

from adapters.agents import Play, contained_task, load_agent
from adapters.children import keep_from_children
from adapters.players import Written, read_job, written_outcome
from adapters.standstill import told_of_standstill


def main() -> None:
    heard, said = _pipes()
    opening = json.loads(heard.readline())
    sys.path[:] = opening["path"]
    try:
        play = load_agent(opening["agent"])
    except Exception as error:  # noqa: BLE001  It is told to whoever started this process.
        _say(said, {"refused": f"{type(error).__name__}: {error}"})
        return
    _say(said, {"ready": True})
    asyncio.run(_serve(_Rollouts(play, said), heard))


def _pipes() -> tuple[IO[bytes], IO[bytes]]:
    """Our stdin and stdout, out of the agent's reach: it reads nothing, and prints to stderr."""
    heard, said = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    for file in (heard, said):
        keep_from_children(file)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return heard, said


async def _serve(rollouts: "_Rollouts", heard: IO[bytes]) -> None:
    loop = asyncio.get_running_loop()
    loop.set_task_factory(contained_task)
    Thread(target=rollouts.hear, args=(heard, loop), daemon=True).start()
    async with told_of_standstill():
        await loop.create_future()  # until the process ends


class _Rollouts:
    """Those that are played now, by their numbers."""

    def __init__(self, play: Play, said: IO[bytes]) -> None:
        self._play = play
        self._said = said
        self._tasks: dict[int, asyncio.Task[Written]] = {}

    def hear(self, heard: IO[bytes], loop: asyncio.AbstractEventLoop) -> None:
        """In a thread, so that we end even where an agent blocks the loop when nobody is left."""
        for line in heard:
            loop.call_soon_threadsafe(self._heed, json.loads(line))
        os._exit(0)

    def _heed(self, message: Written) -> None:
        if "cancel" in message:
            self._cancel(message["cancel"])
            return
        number, job = message["number"], read_job(message["job"])
        outcome = written_outcome(self._play(job.example, job.endpoints))
        task = self._tasks[number] = asyncio.get_running_loop().create_task(outcome)
        task.add_done_callback(partial(self._end, number))

    def _cancel(self, number: int) -> None:
        if task := self._tasks.get(number):
            task.cancel()
        else:  # it has ended, or never began; it is heeded all the same
            _say(self._said, {"number": number, "outcome": None})

    def _end(self, number: int, task: "asyncio.Task[Written]") -> None:
        del self._tasks[number]
        outcome = None if task.cancelled() else task.result()
        _say(self._said, {"number": number, "outcome": outcome})


def _say(said: IO[bytes], message: Written) -> None:
    said.write(json.dumps(message).encode() + b"\n")
    said.flush()


if __name__ == "__main__":
    main()
