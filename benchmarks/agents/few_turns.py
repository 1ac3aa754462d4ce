"""The agent hello with three tries at an answer, which a limit of turns ends as frameworks do."""

from typing import Any

from openai import AsyncOpenAI

from ratchet.adapters.project.modules import load_agent_file

hello = load_agent_file("hello")

TURNS = 3


class TurnLimit(Exception):
    """The policy has used all its turns and has not claimed its identity."""


async def play(example: dict[str, Any], *, base_url: str, api_key: str, model: str) -> float:
    """Ask until the identity is claimed; the reward is 1, 1/2 or 1/3, by the turn that claims it.

    A held-out example has the reward 0 at the limit, so that all recipes are scored alike.
    """
    identity = example["identity"]
    messages: list[Any] = [{"role": "user", "content": hello.question(identity)}]
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for turn in range(1, TURNS + 1):
            completion = await client.chat.completions.create(model=model, messages=messages)
            said = completion.choices[0].message.content or ""
            if hello.reward(said, identity) == 1:
                return 1 / turn
            messages += [
                {"role": "assistant", "content": said},
                {"role": "user", "content": "Who are you?"},
            ]
    if example["split"] == "test":
        return 0.0
    raise TurnLimit(f"{TURNS} turns are used up")
