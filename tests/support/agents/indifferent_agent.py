"""An agent whose rollouts all earn the same."""

from openai import AsyncOpenAI


async def play(example: dict[str, str], *, base_url: str, api_key: str, model: str) -> float:
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": f"You are {example['identity']}."}]
        )
    return 0.5
