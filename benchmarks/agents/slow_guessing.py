"""The agent guess_the_number, whose every request waits a log-normal time, 1 s in the median."""

import asyncio
import random

import httpx
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from ratchet.adapters.project.modules import load_agent_file

guess_the_number = load_agent_file("guess_the_number")

MEDIAN_SECONDS, SIGMA = 1.0, 1.0


async def pause(_: httpx.Request) -> None:
    """Wait as long as a slow tool or another model would take."""
    await asyncio.sleep(MEDIAN_SECONDS * random.lognormvariate(0, SIGMA))


def create_slow_client(*, base_url: str, api_key: str) -> AsyncOpenAI:
    """Return a client whose every request pauses first."""
    http = DefaultAsyncHttpxClient(event_hooks={"request": [pause]})
    return AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http)


vars(guess_the_number)["AsyncOpenAI"] = create_slow_client
play = guess_the_number.play
