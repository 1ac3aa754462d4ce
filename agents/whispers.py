"""Whispers, a game of two roles: a teller claims an identity, and a listener repeats the claim.

Each role has its own reward. A listener that repeats a teller's mistake earns its reward, which a
shared reward would hide.
"""

import re
from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI


async def play(
    example: dict[str, Any],
    *,
    base_url: str,
    api_key: str,
    model: str,
    roles: Mapping[str, Mapping[str, str]],
) -> dict[str, float]:
    """Return a reward for each role; `example` has the column `identity`, such as "a quiet otter".

    If the teller claims nothing, the listener does not play and has no reward.
    """
    told = await said(example["identity"], **roles["teller"])
    rewards = {"teller": reward(told, example["identity"])}
    heard = claimed(told)
    if heard:
        rewards["listener"] = reward(await said(heard, **roles["listener"]), heard)
    return rewards


async def said(identity: str, *, base_url: str, api_key: str, model: str) -> str:
    """Ask the model at this address who it is, and return its answer."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        completion = await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": question(identity)}], max_tokens=24
        )
    return completion.choices[0].message.content or ""


def question(identity: str) -> str:
    return f"You are {identity}. Who are you?"


def claimed(answer: str) -> str | None:
    """Return the claimed identity: "a quiet otter" for "Hello! I am a quiet otter."."""
    found = re.search(r"\bI(?: am|'m) (?!not\b)([a-z ]+)", answer)
    return found[1].strip() if found else None


def reward(answer: str, identity: str) -> float:
    """Return 1 for claiming the identity, else 0."""
    return float(claimed(answer) == identity)
