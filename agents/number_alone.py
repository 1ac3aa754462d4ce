"""An agent that asks a sum in one call; only the number alone earns the reward."""

from typing import Any

from openai import AsyncOpenAI

SHOWN = {"What is 2 + 3?": "5", "What is 9 - 1?": "8"}
"""Questions that the conversation begins with, and their answers."""


async def play(example: dict[str, Any], *, base_url: str, api_key: str, model: str) -> float:
    """Ask once, after two answered examples, and return the reward.

    The answered examples are how a small model learns, before any training, what the number alone
    means. `example` has the columns `question` and `answer`, a whole number.
    """
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        completion = await client.chat.completions.create(
            model=model,
            messages=conversation(example["question"]),
            max_tokens=24,
        )
    return reward(completion.choices[0].message.content or "", int(example["answer"]))


def conversation(question: str) -> list[Any]:
    """Return the messages that ask a question: the answered examples come first."""
    asked = [
        {"role": role, "content": content}
        for shown in SHOWN.items()
        for role, content in zip(("user", "assistant"), shown, strict=True)
    ]
    return [*asked, {"role": "user", "content": question}]


def reward(answer: str, wanted: int) -> float:
    """Return 1 for the right number and nothing else, else 0."""
    return float(answer.strip() == str(wanted))
