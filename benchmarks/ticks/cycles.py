"""A stand-in for a training service that works in cycles, on a clock that jumps to the next event.

Both sides of the benchmark run it, each in an environment of its own, so it needs the standard
library alone. Times are in virtual seconds.
"""

import asyncio
import random
import selectors
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

CYCLE_SECONDS = 10.0
LATENCY_SECONDS = 0.5
"""Time of a request to the service, and of a result to its client."""

MEDIAN_SECONDS, SIGMA, LONGEST_SECONDS = 300.0, 0.8, 1800.0
"""Log-normal time of a rollout; one that would take longer is cut off."""

STUCK_SECONDS = 60.0
"""Real seconds for which another thread may work while nothing else is to come."""


@dataclass(frozen=True)
class Times:
    """Seconds of the rollouts of a run: each depends on nothing but the rollout's place in it."""

    seed: int = 0
    median: float = MEDIAN_SECONDS

    def of(self, step: int, group: int, index: int) -> float:
        """Draw the time of a rollout."""
        drawn = random.Random(f"{self.seed}/{step}/{group}/{index}")
        return min(self.median * drawn.lognormvariate(0, SIGMA), LONGEST_SECONDS)


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(STUCK_SECONDS if timeout is None else 0)
        if not ready and timeout is None:
            raise RuntimeError("the loop waits, and nothing is to come")
        if not ready and timeout is not None:
            self.now += timeout
        return ready


class JumpingLoop(asyncio.SelectorEventLoop):
    """Event loop whose clock stands still while code runs, and jumps to the next timer else."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


@dataclass(eq=False)
class _Request:
    """A request; `datums` are what is left of a pass, and None of a request that takes no room."""

    done: asyncio.Future[None]
    datums: int | None = None
    steps: bool = False


class CyclingService:
    """Training service of one client, whose cycles begin every ten seconds.

    A cycle carries the requests that have come by its beginning, in their order: passes of up to
    `datums` datums, and then one optimizer step, which ends what it carries. A pass that has more
    goes on in the next cycle. Results leave at the end of a cycle. Saves take no room, and hold
    what was carried before them. `carried` has the number of each cycle that carried training, and
    `steps` counts the optimizer's.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, datums: int) -> None:
        self.carried: list[int] = []
        self.steps = 0
        self._loop = loop
        self._datums = datums
        self._sent: deque[_Request] = deque()
        self._queue: deque[_Request] = deque()
        self._working = False

    def forward_backward(self, datums: int) -> asyncio.Future[None]:
        return self._send(_Request(self._loop.create_future(), datums=datums))

    def optim_step(self) -> asyncio.Future[None]:
        return self._send(_Request(self._loop.create_future(), steps=True))

    def save(self) -> asyncio.Future[None]:
        return self._send(_Request(self._loop.create_future()))

    def _send(self, request: _Request) -> asyncio.Future[None]:
        self._sent.append(request)  # timers of the same moment have no order
        self._loop.call_later(LATENCY_SECONDS, self._receive)
        return request.done

    def _receive(self) -> None:
        self._queue.append(self._sent.popleft())
        if not self._working:
            self._plan()

    def _plan(self) -> None:
        """Serve the saves that nothing is before, and begin the next cycle if there is work."""
        self._answer(self._saves())
        self._working = bool(self._queue)
        if self._working:
            number = ceil(self._loop.time() / CYCLE_SECONDS - 1e-9)
            self._loop.call_at(number * CYCLE_SECONDS, self._begin, number)

    def _begin(self, number: int) -> None:
        self.carried.append(number)
        finished, room = list[_Request](), self._datums
        while self._queue:
            first = self._queue[0]
            if first.datums is not None:
                taken = min(room, first.datums)
                room, first.datums = room - taken, first.datums - taken
                if first.datums:
                    break
            finished.append(self._queue.popleft())
            if first.steps:
                self.steps += 1
                finished += self._saves()
                break
        self._loop.call_at((number + 1) * CYCLE_SECONDS, self._end, finished)

    def _end(self, finished: Sequence[_Request]) -> None:
        self._answer(finished)
        self._plan()

    def _saves(self) -> list[_Request]:
        saves = list[_Request]()
        while self._queue and self._queue[0].datums is None and not self._queue[0].steps:
            saves.append(self._queue.popleft())
        return saves

    def _answer(self, finished: Sequence[_Request]) -> None:
        for request in finished:
            self._loop.call_later(LATENCY_SECONDS, request.done.set_result, None)


def measure(service: CyclingService, seconds: float) -> dict[str, Any]:
    """Measure a run that took so many seconds since its first rollouts began.

    `busy` is the share of cycles that carried training, from the first one that did to the last.
    """
    first, last = service.carried[0], service.carried[-1]
    busy = len(service.carried) / (last - first + 1)
    return {"busy": busy, "seconds": seconds, "steps": service.steps}
