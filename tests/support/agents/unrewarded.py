"""The agent hello, which returns no reward."""

from typing import Any

from ratchet.adapters.project.modules import load_agent_file

hello = load_agent_file("hello")


async def play(example: dict[str, Any], **endpoint: str) -> None:
    await hello.play(example, **endpoint)
