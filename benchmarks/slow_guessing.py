"""The agent guess_the_number, whose every request waits a log-normal time, 1 s in the median."""

import asyncio
import random
from functools import partial
from typing import Any

import httpx

from adapters.project.modules import load_agent_file

guess_the_number = load_agent_file("guess_the_number")

MEDIAN_SECONDS, SIGMA = 1.0, 1.0


async def pause(_: httpx.Request) -> None:
    """Wait as long as a slow tool or another model would take."""
    await asyncio.sleep(MEDIAN_SECONDS * random.lognormvariate(0, SIGMA))


slow_client: Any = partial(
    guess_the_number.DefaultAsyncHttpxClient, event_hooks={"request": [pause]}
)
vars(guess_the_number)["DefaultAsyncHttpxClient"] = slow_client
play = guess_the_number.play
