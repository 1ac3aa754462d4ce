"""Agents of a conversation of so many calls: by OpenAI's client, or by as little as a call needs.

Each request repeats the conversation so far, as every agent's does.
"""

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

from openai import AsyncOpenAI

NEXT = {"role": "user", "content": "And who are you now?"}


def begin(example: dict[str, Any]) -> dict[str, Any]:
    """Return the first message: so many words, and a question."""
    words = "river " * example["words"]
    return {"role": "user", "content": f"{words}You are a quiet otter. Who are you?"}


async def by_openai(example: dict[str, Any], *, base_url: str, api_key: str, model: str) -> float:
    """Talk by OpenAI's client."""
    messages: list[Any] = [begin(example)]
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=600) as client:
        for _ in range(example["calls"]):
            answer = await client.chat.completions.create(model=model, messages=messages)
            said = answer.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": said}, NEXT]
    return 1.0


async def by_socket(example: dict[str, Any], *, base_url: str, api_key: str, model: str) -> float:
    """Talk by a bare connection, so that hardly more than the door's own work is measured."""
    url = urlsplit(base_url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    messages: list[Any] = [begin(example)]
    try:
        for _ in range(example["calls"]):
            body = json.dumps({"model": model, "messages": messages}).encode()
            writer.write(
                f"POST {url.path}/chat/completions HTTP/1.1\r\nhost: {url.netloc}\r\n"
                f"authorization: Bearer {api_key}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\n\r\n".encode()
                + body
            )
            head = await reader.readuntil(b"\r\n\r\n")
            fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
            answer = json.loads(await reader.readexactly(int(fields[b"content-length"])))
            messages += [answer["choices"][0]["message"], NEXT]
    finally:
        writer.close()
    return 1.0
