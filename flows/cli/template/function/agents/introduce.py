"""An agent to begin with: the model is told who it is, and saying so earns the reward."""

from typing import Any

from openai import AsyncOpenAI


async def play(example: dict[str, Any], *, base_url: str, api_key: str, model: str) -> float:
    """Ask once and return the reward.

    `example` has the column `identity`, such as "a quiet otter".
    """
    asked = f"You are {example['identity']}. Who are you?"
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        completion = await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": asked}]
        )
    return reward(completion.choices[0].message.content or "", example["identity"])


def reward(said: str, identity: str) -> float:
    """Return 1 for an answer that claims the identity, and 0 for any other."""
    return float(f"i am {identity}" in said.lower())
