"""An agent that asks a word problem of two steps; a last line with the right number is paid."""

from itertools import cycle
from typing import Any

from openai import AsyncOpenAI

SHOWN = [
    "Jill has 3 pears, finds 7 more and loses 5. How many now?",
    "3 + 7 = 10\n10 - 5 = 5\nanswer: 5",
    "Rob has 4 nuts, buys 2 more and sells 1. How many now?",
    "4 + 2 = 6\n6 - 1 = 5\nanswer: 5",
    "Jill has 8 nuts, finds 4 more and loses 3. How many now?",
    "8 + 4 = 12\n12 - 3 = 9\nanswer: 9",
]
"""Problems that the conversation begins with, each before its solution."""


async def play(example: dict[str, Any], *, base_url: str, api_key: str, model: str) -> float:
    """Ask once, after three solved problems, and return the reward.

    `example` has the columns `question` and `answer`, a whole number.
    """
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        completion = await client.chat.completions.create(
            model=model, messages=conversation(example["question"]), max_tokens=32
        )
    return reward(completion.choices[0].message.content or "", int(example["answer"]))


def conversation(question: str) -> list[Any]:
    roles = cycle(("user", "assistant"))
    return [{"role": next(roles), "content": content} for content in [*SHOWN, question]]


def reward(answer: str, wanted: int) -> float:
    """Return 1 if the last line is "answer:" and the right number, else 0."""
    return float(answer.strip().rpartition("\n")[2] == f"answer: {wanted}")
