"""Anthropic's own client, whole and streamed, with a tool. It adds a /v1 to the base URL."""
# The client is not installed where the types are checked.
# pyright: reportMissingImports=false

import asyncio
import os
from typing import Any

from anthropic import Anthropic, AsyncAnthropic
from ways import QUESTIONS, run

MODEL = os.environ["OPENAI_MODEL"]
TOOLS: Any = [
    {
        "name": "look",
        "description": "Look at something.",
        "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}},
    }
]
BOX: Any = {"role": "user", "content": "What is in the box?"}


def at(base_url: str) -> dict[str, Any]:
    return {"base_url": base_url, "api_key": os.environ["OPENAI_API_KEY"]}


def sync(base_url: str) -> None:
    messages: Any = []
    with Anthropic(**at(base_url)) as client:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            answer = client.messages.create(
                model=MODEL, max_tokens=100, system="Be short.", messages=messages
            )
            messages.append({"role": "assistant", "content": answer.content})


def asynchronous(base_url: str) -> None:
    async def talk() -> None:
        messages: Any = []
        async with AsyncAnthropic(**at(base_url)) as client:
            for question in QUESTIONS:
                messages.append({"role": "user", "content": question})
                answer: Any = await client.messages.create(
                    model=MODEL, max_tokens=100, messages=messages
                )
                messages.append({"role": "assistant", "content": answer.content[0].text.strip()})

    asyncio.run(talk())


def stream(base_url: str) -> None:
    messages: Any = []
    with Anthropic(**at(base_url)) as client:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            with client.messages.stream(
                model=MODEL, max_tokens=100, messages=messages
            ) as answering:
                text = "".join(answering.text_stream)
            messages.append({"role": "assistant", "content": text})


def tools(base_url: str) -> None:
    messages: Any = [BOX]
    with Anthropic(**at(base_url)) as client:
        while messages[-1]["role"] == "user":
            answer = client.messages.create(
                model=MODEL, max_tokens=200, messages=messages, tools=TOOLS
            )
            go_on(messages, answer)


def tools_streamed(base_url: str) -> None:
    messages: Any = [BOX]
    with Anthropic(**at(base_url)) as client:
        while messages[-1]["role"] == "user":
            with client.messages.stream(
                model=MODEL, max_tokens=200, messages=messages, tools=TOOLS
            ) as answering:
                answer = answering.get_final_message()
            go_on(messages, answer)


def go_on(messages: Any, answer: Any) -> None:
    """Add the answer to the history, and the results of the tools that it calls."""
    messages.append({"role": "assistant", "content": answer.content})
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": f"{block.input['at']}: a cat"}
        for block in answer.content
        if block.type == "tool_use"
    ]
    if results:
        messages.append({"role": "user", "content": results})


if __name__ == "__main__":
    run(sync, asynchronous, stream, tools, tools_streamed)
