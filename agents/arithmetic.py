"""An agent that solves a word problem in one call; the number after "####" is the answer."""

import re
from typing import Any

from openai import AsyncOpenAI


async def play(example: dict[str, Any], *, base_url: str, api_key: str, model: str) -> float:
    """Ask once and return the reward.

    `example` has the columns `question` and `answer`, a whole number.
    """
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        completion = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question(example["question"])}],
            max_tokens=48,
        )
    return reward(completion.choices[0].message.content or "", int(example["answer"]))


def question(text: str) -> str:
    return f"{text} End with #### and the number."


def reward(answer: str, wanted: int) -> float:
    """Return 1 if the first number after "####" is the right one, else 0."""
    found = re.search(r"####\s*(-?\d+)", answer)
    return float(found is not None and int(found[1]) == wanted)
