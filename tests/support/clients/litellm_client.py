"""LiteLLM as a client, by the name openai/… and a base URL."""

import asyncio
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # before the import: it would fetch the map

import litellm
from ways import QUESTIONS, TOOLS, run

MODEL = f"openai/{os.environ['OPENAI_MODEL']}"


def sync(base_url: str) -> None:
    messages: Any = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        answer: Any = litellm.completion(MODEL, messages, base_url=base_url)
        messages.append(answer.choices[0].message.model_dump())


def asynchronous(base_url: str) -> None:
    async def talk() -> None:
        messages: Any = []
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            answer: Any = await litellm.acompletion(MODEL, messages, base_url=base_url)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})

    asyncio.run(talk())


def stream(base_url: str) -> None:
    messages: Any = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        chunks: Any = litellm.completion(MODEL, messages, base_url=base_url, stream=True)
        content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        messages.append({"role": "assistant", "content": content})


def tools(base_url: str) -> None:
    messages: Any = [{"role": "user", "content": "What is in the box?"}]
    while True:
        answer: Any = litellm.completion(MODEL, messages, base_url=base_url, tools=TOOLS)
        message = answer.choices[0].message
        messages.append(message.model_dump())
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "a cat"})


if __name__ == "__main__":
    run(sync, asynchronous, stream, tools)
