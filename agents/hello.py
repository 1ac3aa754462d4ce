"""The smallest agent: the prompt names an identity, and claiming it earns the reward."""

import re
from typing import Any

from openai import AsyncOpenAI

ANSWERS = re.compile(r"A: (?P<A>.*?)\nB: (?P<B>.*?)\n[^\n]*Answer A, B or Tie\.", re.S)
"""What a judge of pairs is asked of two answers."""


async def play(example: dict[str, Any], *, base_url: str, api_key: str, model: str) -> float:
    """Ask once and return the reward.

    `example` has the column `identity`, such as "a quiet otter".
    """
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        completion = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question(example["identity"])}],
            max_tokens=24,
        )
    return reward(completion.choices[0].message.content or "", example["identity"])


def question(identity: str) -> str:
    return f"You are {identity}. Who are you?"


def reward(answer: str, identity: str) -> float:
    """Return 1 for claiming the identity, -1 for denying it, 0 for anything else."""
    said, claimed = answer.lower(), identity.lower()
    if f"i am {claimed}" in said or f"i'm {claimed}" in said:
        return 1.0
    return -1.0 if f"not {claimed}" in said else 0.0


def compare(messages: list[dict[str, Any]], example: dict[str, Any]) -> str:
    """Say which of two answers is better, as `judge:pairs` asks it, in a judge's place.

    It is the one that claims the identity of the question.
    """
    answers = ANSWERS.search(messages[-1]["content"])
    if answers is None:
        return "There are no two answers."
    identity = example["example"]["identity"]
    first, second = (reward(answers[name], identity) for name in "AB")
    return "Tie" if first == second else "A" if first > second else "B"
