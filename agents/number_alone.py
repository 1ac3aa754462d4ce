"""An agent that asks a sum in one call; only the number alone earns the reward."""

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
            max_tokens=24,
        )
    return reward(completion.choices[0].message.content or "", int(example["answer"]))


def question(text: str) -> str:
    return f"{text} Answer with the number alone."


def reward(answer: str, wanted: int) -> float:
    """Return 1 for the right number and nothing else, else 0."""
    return float(answer.strip() == str(wanted))
