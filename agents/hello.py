"""The smallest agent: the prompt names an identity, and claiming it earns the reward."""

from typing import Any

from openai import AsyncOpenAI


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

    It is the one that claims the identity of the question. Headings begin with the prompt's first
    word, which no answer contains.
    """
    prompt = messages[-1]["content"]
    if not prompt.endswith("Answer A, B or Tie."):
        return "There are no two answers."
    mark, *_ = prompt.split(maxsplit=1)
    *_, first, second, _ = prompt.split(f"\n{mark} ")
    identity = example["example"]["identity"]
    left, right = (reward(answer, identity) for answer in (first, second))
    return "Tie" if left == right else "A" if left > right else "B"
