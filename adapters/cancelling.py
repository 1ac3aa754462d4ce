"""How tasks are cancelled: by whoever began them, who also waits for their end."""

import asyncio
from typing import Any


async def cancel_and_wait(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel those that have not ended, and wait until each has, after all that it began itself.

    The end of a loop would cancel whatever is left at once, children beside their parents and some
    before they begin; anyio, which ends its children in order, then leaves coroutines that never
    ran.
    """
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
