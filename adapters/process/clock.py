"""A clock of the time in which this process runs, and waits that are logged by it.

Timeouts and waits are measured by the clock. It stands still while the process does: after a
SIGSTOP, or while the machine sleeps. So a stall is nobody's timeout.
"""

import logging
import time
from functools import cache
from threading import Thread

TICK_SECONDS = 0.5
LONGEST_TICK = 2.0
"""Seconds that a tick may take on a busy machine; in what exceeds them the process stood still."""

WORTH_A_WORD = 10.0
"""Seconds of a standstill that is logged."""

FIRST_WORD_SECONDS = 20.0

log = logging.getLogger(__name__)


class RunningClock:
    """Clock of a process, whose thread ticks also while an event loop is blocked."""

    def __init__(self) -> None:
        self._tick = time.monotonic(), time.monotonic()
        """Time of this clock, and of the system's, at the last tick."""
        Thread(target=self._run, name="running clock", daemon=True).start()

    def seconds(self) -> float:
        """Return the time of this clock: the system's time without the time in which the process
        stood still.

        Only differences of it mean anything.
        """
        counted, ticked = self._tick
        return counted + min(time.monotonic() - ticked, LONGEST_TICK)

    def stood_still(self) -> float:
        """Return the seconds, up to now, in which the process stood still."""
        return time.monotonic() - self.seconds()

    def _run(self) -> None:
        while True:
            time.sleep(TICK_SECONDS)
            counted, ticked = self._tick
            now = time.monotonic()
            passed = now - ticked
            self._tick = counted + min(passed, LONGEST_TICK), now
            if passed - TICK_SECONDS >= WORTH_A_WORD:
                log.warning(
                    "this process stood still for %.0f s: it was stopped, or the machine slept. "
                    "No timeout counts that time",
                    passed,
                )


@cache
def running_clock() -> RunningClock:
    """Return the clock of this process, which is made and started at the first call."""
    return RunningClock()


class Wait:
    """One wait for `what`: a warning after 20 s, then a line whenever it has lasted twice as long.

    `limit` is in seconds; None waits for ever. A wait with a limit below 60 s is logged at a third
    of it. Time in which this process stood still does not count.
    """

    def __init__(self, what: str, limit: float | None) -> None:
        self.what = what
        self.limit = limit
        self._clock = running_clock()
        self._started = self._clock.seconds()
        self._next_word = min(FIRST_WORD_SECONDS, limit / 3 if limit else FIRST_WORD_SECONDS)
        self._level = logging.WARNING

    @property
    def seconds(self) -> float:
        return self._clock.seconds() - self._started

    @property
    def over(self) -> bool:
        return self.limit is not None and self.seconds >= self.limit

    def until_next(self) -> float:
        """Return the seconds until the wait is logged again or its limit is reached."""
        due = self._next_word if self.limit is None else min(self._next_word, self.limit)
        return max(due - self.seconds, 0.01)

    def speak(self, more: str = "") -> None:
        """Log the wait, followed by `more`, if it is due."""
        seconds = self.seconds
        if seconds < self._next_word:
            return
        self._next_word = 2 * seconds
        last = "" if self.limit is None else f"; it is given up after {self.limit:.0f} s"
        log.log(self._level, "waiting for %s for %.0f s%s%s", self.what, seconds, more, last)
        self._level = logging.INFO
