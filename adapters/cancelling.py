"""Cancellation of asyncio tasks by whoever began them, who also waits for their end."""

import asyncio
from collections.abc import Awaitable
from typing import Protocol


class Cancellable(Awaitable[object], Protocol):
    """An asyncio task or future."""

    def cancel(self) -> bool: ...


async def cancel_and_wait(*tasks: Cancellable) -> None:
    """Cancel the tasks that have not ended, and wait until each has ended with its own children.

    If tasks were left to the end of the event loop, it would cancel children beside their parents,
    some of them before they begin. anyio, which ends its children in order, then leaves coroutines
    that never ran.
    """
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
