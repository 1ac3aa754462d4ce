"""What the time of a command is spent on: one phase after another, from the process's start."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import accumulate, pairwise

import psutil

STARTING = "to start"
ROLLOUTS, TRAINING = "of sampling and training", "of training"
EVALUATION = "of evaluation"
CLOSING = "to record and to close"


class Phases:
    """Seconds of each phase, whose name says what they were spent on; one phase is under way.

    What runs beside a phase, such as an evaluation beside a step, is no phase until it is awaited.
    """

    def __init__(self, age: float) -> None:
        self._since = time.monotonic() - age
        self._phase = STARTING
        self._seconds = {STARTING: 0.0}

    def enter(self, phase: str) -> str:
        """End the phase that is under way, and begin another; return the one that has ended."""
        now, ended = time.monotonic(), self._phase
        self._seconds[ended] += now - self._since
        self._seconds.setdefault(phase, 0.0)
        self._phase, self._since = phase, now
        return ended

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Have a phase within this block, and after it the one that was under way before."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def describe(self) -> str:
        """Say how long it has been, and what of it each phase took; the parts add up."""
        self.enter(self._phase)
        ends = [0, *map(round, accumulate(self._seconds.values()))]
        taken = [later - earlier for earlier, later in pairwise(ends)]
        parts = [f"{n} s {phase}" for phase, n in zip(self._seconds, taken, strict=True) if n]
        return f"{ends[-1]} s: {', '.join(parts)}" if parts[1:] else f"{ends[-1]} s"


@cache
def phases() -> Phases:
    """Return the phases of this process."""
    return Phases(time.time() - psutil.Process().create_time())
