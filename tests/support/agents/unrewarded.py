"""The agent hello, which returns no reward."""

from typing import Any

from agents import hello


async def play(example: dict[str, Any], **endpoint: str) -> None:
    await hello.play(example, **endpoint)
