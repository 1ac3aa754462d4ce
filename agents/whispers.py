"""Whispers, for two roles: a teller says who it is, and a listener says what it was told.

Each is paid for its own part only. A listener that repeats a teller's mistake did well, which one
reward for both would hide.
"""

import re
import ssl
from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

TLS = ssl.create_default_context()
"""Reading the certificates takes 20 ms: once a process, not once a rollout."""


async def play(
    example: dict[str, Any],
    *,
    base_url: str,
    api_key: str,
    model: str,
    roles: Mapping[str, Mapping[str, str]],
) -> dict[str, float]:
    """A reward for each role; `example` has the column `identity`, such as "a quiet otter".

    A teller that claims nothing leaves its listener without a part, and so without a reward.
    """
    told = await said(example["identity"], **roles["teller"])
    rewards = {"teller": reward(told, example["identity"])}
    heard = claimed(told)
    if heard:
        rewards["listener"] = reward(await said(heard, **roles["listener"]), heard)
    return rewards


async def said(identity: str, *, base_url: str, api_key: str, model: str) -> str:
    """What the model at this address answers to being told who it is."""
    http = DefaultAsyncHttpxClient(verify=TLS)
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http) as client:
        completion = await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": question(identity)}], max_tokens=24
        )
    return completion.choices[0].message.content or ""


def question(identity: str) -> str:
    return f"You are {identity}. Who are you?"


def claimed(answer: str) -> str | None:
    """Who the answer says that it is: "a quiet otter" of "Hello! I am a quiet otter."."""
    found = re.search(r"\bI(?: am|'m) (?!not\b)([a-z ]+)", answer)
    return found[1].strip() if found else None


def reward(answer: str, identity: str) -> float:
    """1 for claiming the identity, else 0."""
    return float(claimed(answer) == identity)
