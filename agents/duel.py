"""A duel of two players who are told the same identity: who claims it beats one who does not.

What one earns the other loses. In self-play one policy plays both.
"""

from collections.abc import Mapping
from typing import Any

from hello import question, reward
from openai import AsyncOpenAI

Players = Mapping[str, Mapping[str, str]]


async def play(
    example: dict[str, Any], *, base_url: str, api_key: str, model: str, roles: Players
) -> dict[str, float]:
    """Return the reward of each player; `example` has the column `identity`."""
    identity = example["identity"]
    answers = [await answer(identity, **roles[player]) for player in ("policy", "opponent")]
    ours, theirs = (reward(said, identity) > 0 for said in answers)
    return {"policy": float(ours - theirs), "opponent": float(theirs - ours)}


async def answer(identity: str, *, base_url: str, api_key: str, model: str) -> str:
    """Ask the player at this address who it is."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        completion = await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": question(identity)}], max_tokens=24
        )
    return completion.choices[0].message.content or ""
