"""OpenAI's own client: a growing history, by every method that sends one."""

import asyncio
import json
import os
from typing import Any

from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessage
from pydantic import BaseModel
from ways import QUESTIONS, TOOLS, run

MODEL = os.environ["OPENAI_MODEL"]


class Guess(BaseModel):
    number: int
    why: str


def sync(base_url: str) -> None:
    messages: Any = []
    with OpenAI(base_url=base_url) as client:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            answer = client.chat.completions.create(model=MODEL, messages=messages)
            messages.append(answer.choices[0].message)


def asynchronous(base_url: str) -> None:
    async def talk() -> None:
        messages: Any = [{"role": "system", "content": "Be short."}]
        async with AsyncOpenAI(base_url=base_url) as client:
            for question in QUESTIONS:
                messages.append({"role": "user", "content": question})
                answer = await client.chat.completions.create(model=MODEL, messages=messages)
                content = (answer.choices[0].message.content or "").strip()
                messages.append({"role": "assistant", "content": content})

    asyncio.run(talk())


def stream(base_url: str) -> None:
    messages: Any = []
    with OpenAI(base_url=base_url) as client:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            options: Any = {"include_usage": True}
            chunks = client.chat.completions.create(
                model=MODEL, messages=messages, stream=True, stream_options=options
            )
            deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
            content = "".join(delta.content or "" for delta in deltas)
            messages.append({"role": "assistant", "content": content})


def parse(base_url: str) -> None:
    messages: Any = []
    with OpenAI(base_url=base_url) as client:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            answer = client.chat.completions.parse(
                model=MODEL, messages=messages, response_format=Guess
            )
            message = answer.choices[0].message
            assert message.parsed is not None
            assert message.parsed.number == 7
            messages.append({"role": "assistant", "content": message.content})


def tools(base_url: str) -> None:
    messages: Any = [{"role": "user", "content": "What is in the box?"}]
    with OpenAI(base_url=base_url) as client:
        while calls := called(client, messages):
            for call in calls:
                at = json.loads(call.function.arguments)["at"]
                result = {"role": "tool", "tool_call_id": call.id, "content": f"{at}: a cat"}
                messages.append(result)


def called(client: OpenAI, messages: Any) -> list[Any]:
    """Add the next answer to the history; return the tools that it calls."""
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
    message: ChatCompletionMessage = answer.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    return message.tool_calls or []


def tools_streamed(base_url: str) -> None:
    messages: Any = [{"role": "user", "content": "What is in the box?"}]
    with OpenAI(base_url=base_url) as client:
        while True:
            with client.chat.completions.stream(
                model=MODEL, messages=messages, tools=TOOLS
            ) as events:
                message = events.get_final_completion().choices[0].message
            messages.append(message)
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "a cat"})


def responses(base_url: str) -> None:
    history: Any = []
    with OpenAI(base_url=base_url) as client:
        for question in QUESTIONS:
            history.append({"role": "user", "content": question})
            history += client.responses.create(model=MODEL, input=history).output


def responses_streamed(base_url: str) -> None:
    history: Any = []
    with OpenAI(base_url=base_url) as client:
        for question in QUESTIONS:
            history.append({"role": "user", "content": question})
            with client.responses.stream(model=MODEL, input=history) as events:
                history += events.get_final_response().output


if __name__ == "__main__":
    run(sync, asynchronous, stream, parse, tools, tools_streamed, responses, responses_streamed)
