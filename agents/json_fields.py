"""An agent that has a sentence written as JSON of a given form; each right field is paid."""

import json
from typing import Any

from openai import AsyncOpenAI


async def play(example: dict[str, Any], *, base_url: str, api_key: str, model: str) -> float:
    """Ask once and return the reward.

    `example` has the columns `text`, `name`, `age` and `city`.
    """
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        completion = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question(example["text"])}],
            max_tokens=48,
        )
    wanted = {key: example[key] for key in ("name", "age", "city")}
    return reward(completion.choices[0].message.content or "", wanted)


def question(text: str) -> str:
    return (
        f"{text}\nWrite a JSON object with name (a string), age (a number) and city (a string), "
        "and nothing else."
    )


def reward(answer: str, wanted: dict[str, str | int]) -> float:
    """Return the share of right fields of a JSON object of this form and nothing else, else 0."""
    try:
        found = json.loads(answer)
    except ValueError:
        return 0.0
    if not isinstance(found, dict) or set(found) != set(wanted):
        return 0.0
    right = [
        type(found[key]) is type(value) and found[key] == value for key, value in wanted.items()
    ]
    return sum(right) / len(right)
