"""Waits that are logged while they last, calls in threads, and the end of cancelled tasks."""

import asyncio
import contextvars
import logging
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Any, ParamSpec, TypeVar

from adapters.process.running_clock import running_clock

FIRST_WORD_SECONDS = 20.0

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger(__name__)


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


def call_in_thread(
    name: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> Future[T]:
    """Call a function that blocks in a thread of its own, with a copy of the context.

    The future raises whatever the function raises, exits included; it cannot be cancelled. A
    function that never returns costs only its thread: unlike in a pool, neither the next call nor
    the end of the process waits for it.
    """
    returned: Future[T] = Future()
    returned.set_running_or_notify_cancel()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            returned.set_result(context.run(function, *args, **kwargs))
        except BaseException as error:  # noqa: BLE001  It is raised where the result is awaited.
            returned.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return returned


async def cancel_and_wait(*tasks: asyncio.Future[Any]) -> None:
    """Cancel the tasks that have not ended, and wait until each has ended with its own children.

    If tasks were left to the end of the event loop, it would cancel children beside their parents,
    some of them before they begin. anyio, which ends its children in order, then leaves coroutines
    that never ran.
    """
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
