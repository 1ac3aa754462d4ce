"""Event loops whose timers count by the running clock, and the work beside a loop.

On asyncio's own loop, a timeout that ends while the process stands still ends a wait whose data
came meanwhile, as an HTTP client's, which is then an error of the agent with that client.
"""

import asyncio
import contextvars
import logging
import sys
import sysconfig
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import Any, ParamSpec, TypeVar

from ratchet.adapters.process.clock import FIRST_WORD_SECONDS, running_clock

STDLIB = sysconfig.get_path("stdlib")
MOST_THREADS = 128
"""Threads in which agents work at a time by `asyncio.to_thread`: asyncio's own are one loop's."""
SHORT_TEXT = 20_000
"""Characters of a text on which work takes a few milliseconds."""

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger(__name__)

_threads = ThreadPoolExecutor(2, "aside")
_starting = threading.Lock()


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


def run_in_lasting_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the event loop of all agents of this process, and wait for its result.

    A client, a lock or a semaphore that an agent's module keeps belongs to the first loop that
    waits for it, so that loop lasts as long as the process. CancelledError if it is cancelled.
    """
    try:
        return _lasting(work).result()
    except CancelledError as error:
        raise asyncio.CancelledError from error


async def on_lasting_loop(work: Coroutine[Any, Any, T]) -> T:
    """Await work on that loop, from it or from another one."""
    return await asyncio.wrap_future(_lasting(work))


def _lasting(work: Coroutine[Any, Any, T]) -> Future[T]:
    with _starting:
        return asyncio.run_coroutine_threadsafe(work, _lasting_loop())


@cache
def _lasting_loop() -> asyncio.AbstractEventLoop:
    started = Future[asyncio.AbstractEventLoop]()

    async def last() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(MOST_THREADS, "agents"))
        async with watch_event_loop():
            started.set_result(loop)
            await asyncio.Event().wait()

    threading.Thread(target=run_event_loop, args=[last()], name="agents", daemon=True).start()
    return started.result()


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


async def run_aside(
    characters: int, work: Callable[P, T], *arguments: P.args, **named: P.kwargs
) -> T:
    """Work on a text of `characters`: at once if they are few, or else in one of two threads."""
    if characters <= SHORT_TEXT:
        return work(*arguments, **named)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_threads, partial(work, *arguments, **named))


def call_in_thread(
    name: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> Future[T]:
    """Call a function that blocks in a thread of its own, with a copy of the context.

    The future raises whatever the function raises, exits included; it cannot be cancelled. Nothing
    waits for the thread of a function that never returns, as it would in a pool.
    """
    returned: Future[T] = Future()
    returned.set_running_or_notify_cancel()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            returned.set_result(context.run(function, *args, **kwargs))
        except BaseException as error:  # noqa: BLE001  It is raised where the result is awaited.
            returned.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return returned


async def cancel_and_wait(*tasks: asyncio.Future[Any]) -> None:
    """Cancel the tasks that have not ended, and wait until each has ended with its own children.

    The end of the event loop would cancel children beside their parents, some of them before they
    begin, so that anyio, which ends its children in order, would leave coroutines that never ran.
    """
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
