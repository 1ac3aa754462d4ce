"""A watchdog of the event loop: one coroutine that blocks stops every rollout of the process."""

import asyncio
import logging
import sys
import sysconfig
import threading
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from adapters.process.running_clock import running_clock
from adapters.process.waiting import FIRST_WORD_SECONDS

STDLIB = sysconfig.get_path("stdlib")

log = logging.getLogger(__name__)


@asynccontextmanager
async def watch_event_loop(first_word: float = FIRST_WORD_SECONDS) -> AsyncIterator[None]:
    """Log, while the block runs, where the loop stands still after `first_word` seconds.

    The loop is logged again whenever it has stood still for twice as long. This takes a thread: a
    coroutine that blocks can be neither timed out nor cancelled, and stops every task of its loop.
    """
    loop = _Loop(threading.get_ident(), first_word)
    turning = asyncio.create_task(loop.turn())
    thread = threading.Thread(target=loop.watch, name="standstill", daemon=True)
    thread.start()
    try:
        yield
    finally:
        turning.cancel()
        loop.over.set()


class _Loop:
    def __init__(self, thread: int, first_word: float) -> None:
        self.over = threading.Event()
        self._thread = thread
        self._first_word = first_word
        self._clock = running_clock()
        self._turned = self._clock.seconds()

    async def turn(self) -> None:
        while True:
            self._turned = self._clock.seconds()
            await asyncio.sleep(self._first_word / 4)

    def watch(self) -> None:
        next_word = self._first_word
        while not self.over.wait(self._first_word / 4):
            still = self._clock.seconds() - self._turned
            if still < self._first_word:
                next_word = self._first_word
            elif still >= next_word:
                next_word = 2 * still
                log.warning(
                    "all rollouts of this process have stood still for %.0f s, at %s: a coroutine "
                    "that blocks stops its event loop. Write the agent as a plain function, which "
                    "gets a thread of its own, or await what it waits for",
                    still,
                    self._where(),
                )

    def _where(self) -> str:
        """Describe the innermost line that is not in Python's own library."""
        frame = sys._current_frames().get(self._thread)
        stack = traceback.extract_stack(frame)
        ours = [line for line in stack if not line.filename.startswith(STDLIB)]
        line = (ours or stack)[-1]
        return f"{line.filename}, line {line.lineno}, in {line.name}"
