"""An agent that answers a conversation, for which no reward is known: a judge compares its answers.

The conversations are those of pairs of answers, such as Anthropic's hh-rlhf, without the last one.
"""

import re
from typing import Any

from openai import AsyncOpenAI

SPEAKER = re.compile(r"\n\n(Human|Assistant):")
ROLES = {"Human": "user", "Assistant": "assistant"}


async def play(example: dict[str, Any], *, base_url: str, api_key: str, model: str) -> None:
    """Answer what `example` has in its column `chosen`, up to the last answer."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        await client.chat.completions.create(model=model, messages=conversation(example["chosen"]))


def conversation(chosen: str | list[dict[str, str]]) -> list[Any]:
    """Return the messages before the last answer, of a list of messages or of a transcript."""
    if not isinstance(chosen, str):
        return chosen[:-1]
    _, *said = SPEAKER.split(chosen)
    turns = zip(said[::2], said[1::2], strict=True)
    return [{"role": ROLES[who], "content": text.strip()} for who, text in turns][:-1]
