"""Event loops whose timers count by the running clock, those of libraries too.

On asyncio's own loop, a timeout that ends while the process stands still ends a wait whose data
came meanwhile. That of an HTTP client, for instance, is then an error of the agent that has it.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from adapters.process.running_clock import running_clock

T = TypeVar("T")


class RunningLoop(asyncio.SelectorEventLoop):
    """Event loop whose time stands still while its process does."""

    def __init__(self) -> None:
        self._running = running_clock()
        super().__init__()

    def time(self) -> float:
        return self._running.seconds()


def run_event_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a loop of its own, as `asyncio.run` does."""
    with asyncio.Runner(loop_factory=RunningLoop) as runner:
        return runner.run(work)
