"""Work on a text, beside the event loop if the text is long."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

SHORT = 20_000
"""Characters of a text on which work takes a few milliseconds."""

Parameters = ParamSpec("Parameters")
Made = TypeVar("Made")

_threads = ThreadPoolExecutor(2, "aside")


async def run_aside(
    characters: int,
    work: Callable[Parameters, Made],
    *arguments: Parameters.args,
    **named: Parameters.kwargs,
) -> Made:
    """Do the work on so many characters: at once if they are few, or else in one of two threads."""
    if characters <= SHORT:
        return work(*arguments, **named)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_threads, partial(work, *arguments, **named))
