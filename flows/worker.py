"""worker: play the rollouts of runs that want workers, one run after the other, until stopped."""

import asyncio
import logging
import random
import signal
from collections.abc import Callable

from adapters.waiting import Wait
from adapters.worker import DoorGone, WorkerRefused, serve
from tasks.doors import Announced, found_doors, run_token

WANTED = "a run that wants workers (rollouts.where: workers)"

LOOK_SECONDS = 2.0
"""How often it is looked for a run. A run that was killed may be found for long."""

log = logging.getLogger(__name__)


def work(door: str | None, concurrency: int, processes: int) -> None:
    """Play at `door`, by the token in RATCHET_TOKEN; or at any door that is found.

    Ctrl-C or SIGTERM ends it, and what it was playing goes to others at once.
    """
    find = (lambda: [Announced(door, run_token())]) if door else found_doors
    asyncio.run(_until_stopped(find, concurrency, processes))


async def _until_stopped(
    find: Callable[[], list[Announced]], concurrency: int, processes: int
) -> None:
    working = asyncio.ensure_future(_work(find, concurrency, processes))
    loop = asyncio.get_running_loop()
    for stop in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(stop, working.cancel)
    try:
        await working
    except asyncio.CancelledError:
        log.info("stopped")


async def _work(find: Callable[[], list[Announced]], concurrency: int, processes: int) -> None:
    told: set[str] = set()
    waiting = Wait(WANTED, None)
    while True:
        if doors := await asyncio.to_thread(find):
            door = random.choice(doors)
            try:
                await serve(door.url, door.token, concurrency, processes)
            except (DoorGone, WorkerRefused) as error:
                if str(error) not in told:
                    log.warning("%s", error)
                told.add(str(error))
            waiting = Wait(WANTED, None)
        waiting.speak()
        await asyncio.sleep(LOOK_SECONDS)
