"""Agents that the workers of a Dask cluster play."""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

if log := os.environ.get("IMPORTED_BY"):  # a file that gets a line for each import
    with Path(log).open("a") as file:
        file.write(f"{os.getpid()}\n")


async def talks(example: dict[str, Any], *, base_url: str, api_key: str, model: str) -> float:
    """Make calls, each with what was said so far, and think between them.

    The file `player` of the example gets the process, its host and the time. A poisonous example
    ends the process of its group's first rollout.
    """
    if "player" in example:
        with Path(example["player"]).open("a") as file:
            file.write(f"{os.getpid()} {os.environ.get('NODE')} {time.time()}\n")
    messages: list[Any] = [{"role": "user", "content": str(example["number"])}]
    said = ""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=60) as client:
        for _ in range(example.get("calls", 3)):
            answer = await client.chat.completions.create(model=model, messages=messages)
            said = answer.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "?"}]
            if example.get("poison") and "-00/attempt" in base_url:
                os._exit(7)
            await asyncio.sleep(example.get("thinks", 0))
    return float(len(said))
