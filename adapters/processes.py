"""A pool of processes that play rollouts, many at a time each.

Rollouts of one process share its interpreter's lock. An agent that computes between its calls, as
CrewAI does, gets as many cores as there are processes. What is exchanged is JSON, a line each way.
"""

import asyncio
import json
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from itertools import count
from threading import Lock, Thread, Timer
from typing import Any, Self, TypeVar

from adapters.agents import AgentExit
from adapters.children import keep_from_children
from adapters.players import (
    AgentFailed,
    Job,
    PlayerLost,
    PlayersFailed,
    Playing,
    Written,
    owed,
    read_outcome,
)
from adapters.rewards import Reward

HEEDING_SECONDS = 10.0
"""A process that does not heed a cancellation for so long stands still, and is ended."""

T = TypeVar("T")

log = logging.getLogger(__name__)


class Processes:
    """Plays an agent's rollouts in `size` processes, 0 for one a processor; it replaces the dead.

    Nobody knows which of its rollouts ended a process. So all are lost, and each is played anew in
    a process that plays nothing else; if that ends too, it was the agent's doing.
    """

    def __init__(self, agent: str, size: int = 0) -> None:
        self._agent = agent
        self._size = size or os.cpu_count() or 1
        self._processes: list[AgentProcess] = []
        self._turns: tuple[object, asyncio.Semaphore] | None = None

    def __enter__(self) -> Self:
        self._processes = [AgentProcess(self._agent) for _ in range(self._size)]
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.close()

    async def loaded(self) -> None:
        """Return when every process has the agent; PlayersFailed if one cannot."""
        await asyncio.gather(*(process.loaded() for process in self._processes))

    @asynccontextmanager
    async def begun(self, job: Job) -> AsyncIterator[Playing]:
        """As `Player.begun`; PlayersFailed if the agent cannot be loaded."""
        if not job.alone:
            async with self._least_busy().begun(job) as playing:
                yield playing
            return
        async with self._turn():
            process = AgentProcess(self._agent)
            try:
                async with process.begun(job) as playing:
                    yield Playing(playing.where, _to_blame(playing))
            finally:
                process.close()

    def _least_busy(self) -> "AgentProcess":
        self._processes = [
            AgentProcess(self._agent) if process.died else process for process in self._processes
        ]
        return min(self._processes, key=AgentProcess.load)

    def _turn(self) -> asyncio.Semaphore:
        """No more play alone than the pool has processes. A semaphore is of one event loop."""
        loop = asyncio.get_running_loop()
        if self._turns is None or self._turns[0] is not loop:
            self._turns = loop, asyncio.Semaphore(self._size)
        return self._turns[1]


class AgentProcess:
    """A child that plays rollouts of one agent, and ends when its stdin closes."""

    def __init__(self, agent: str) -> None:
        self._ready: Future[None] = owed()
        self._rewards: dict[int, Future[Reward]] = {}
        self._unheeded: set[int] = set()
        self._numbers = count()
        self._lock = Lock()
        self._alive = True
        self._process = subprocess.Popen(
            [sys.executable, "-m", "adapters.playing"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C is ours to handle
        )
        assert self._process.stdin is not None
        keep_from_children(self._process.stdin)
        self._name = f"process {self._process.pid}"
        self._speaker = ThreadPoolExecutor(1, f"to {self._name}")  # a full pipe blocks no loop
        Thread(target=self._hear, name=f"from {self._name}", daemon=True).start()
        self._say({"agent": agent, "path": sys.path})

    @property
    def died(self) -> bool:
        """Whether it played and plays no more; one that could not begin stays, to say why."""
        return not self._alive and self._ready.exception() is None

    def load(self) -> tuple[bool, int]:
        """How unfit it is for one more rollout."""
        return bool(self._unheeded), len(self._rewards)

    async def loaded(self) -> None:
        await _awaited(self._ready)

    @asynccontextmanager
    async def begun(self, job: Job) -> AsyncIterator[Playing]:
        number, reward = next(self._numbers), owed()
        with self._lock:
            alive = self._alive
            if alive:
                self._rewards[number] = reward  # it counts as load from now on
        try:
            await self.loaded()
            if not alive:
                raise PlayerLost(f"{self._name} has ended")
            self._say({"number": number, "job": job.written()})
            yield Playing(self._name, _awaited(reward))
        finally:
            self._leave(number)

    def close(self) -> None:
        """End it at once, with what it still plays."""
        self._speaker.shutdown(wait=False, cancel_futures=True)
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def _leave(self, number: int) -> None:
        """Cancel the rollout if it has not ended."""
        with self._lock:
            if self._rewards.pop(number, None) is None:
                return
            self._unheeded.add(number)
        self._say({"cancel": number})
        deadline = Timer(HEEDING_SECONDS, self._end_if_deaf, [number])
        deadline.daemon = True
        deadline.start()

    def _end_if_deaf(self, number: int) -> None:
        if self._alive and number in self._unheeded:
            log.warning(
                "%s has not heeded a cancellation for %.0f s: an agent blocks its event loop. It "
                "is ended, and its other rollouts are played anew",
                self._name,
                HEEDING_SECONDS,
            )
            self._process.kill()

    def _say(self, message: Written) -> None:
        with self._lock:
            if self._alive:
                self._speaker.submit(self._write, json.dumps(message).encode() + b"\n")

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # it has ended, which the other thread hears
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def _hear(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.endswith(b"\n"):
                self._heed(json.loads(line))
        self._end(self._process.wait())

    def _heed(self, said: Written) -> None:
        if "number" not in said:
            _settle(self._ready, _begin, said)
            return
        with self._lock:
            self._unheeded.discard(said["number"])
            reward = self._rewards.pop(said["number"], None)
        if reward is not None:
            _settle(reward, read_outcome, said["outcome"])

    def _end(self, code: int) -> None:
        how = f"{self._name} ended " + (f"by signal {-code}" if code < 0 else f"with code {code}")
        with self._lock:
            self._alive = False
            lost, self._rewards = self._rewards, {}
        self._speaker.shutdown(wait=False)
        if not self._ready.done():
            text = f"{how} before it had loaded the agent; what it wrote is above"
            self._ready.set_exception(PlayersFailed(text))
        for reward in lost.values():
            reward.set_exception(PlayerLost(how, alone=True))


def _begin(said: Written) -> None:
    if "refused" in said:
        raise PlayersFailed(f"another process cannot load the agent: {said['refused']}")


async def _to_blame(playing: Playing) -> Reward:
    try:
        return await playing.reward
    except PlayerLost as lost:
        text = f"the agent ended its process, twice; the second time it was alone there: {lost}"
        raise AgentExit(text) from lost


async def _awaited(future: Future[T]) -> T:
    return await asyncio.wrap_future(future)


def _settle(future: Future[Any], read: Callable[[Written], Any], written: Written) -> None:
    try:
        value = read(written)
    except (PlayersFailed, PlayerLost, AgentFailed) as error:
        future.set_exception(error)
    else:
        future.set_result(value)
