"""OpenAI's Agents SDK, over chat completions and over the Responses API."""
# The SDK is not installed where the types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import asyncio
import os
from typing import Any

from openai import AsyncOpenAI
from pydantic import BaseModel
from ways import QUESTIONS, run

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)

MODEL = os.environ["OPENAI_MODEL"]


class Guess(BaseModel):
    number: int
    why: str


@function_tool
def look(at: str) -> str:
    """Look at something."""
    return f"{at}: a cat"


def completions_model(base_url: str) -> Any:
    return OpenAIChatCompletionsModel(MODEL, AsyncOpenAI(base_url=base_url))


def responses_model(base_url: str) -> Any:
    return OpenAIResponsesModel(MODEL, AsyncOpenAI(base_url=base_url))


async def talk(agent: Any) -> list[Any]:
    history: list[Any] = []
    answers = []
    for question in QUESTIONS:
        result = await Runner.run(agent, [*history, {"role": "user", "content": question}])
        answers.append(result.final_output)
        history = result.to_input_list()
    return answers


async def talk_streamed(agent: Any) -> None:
    history: list[Any] = []
    for question in QUESTIONS:
        result = Runner.run_streamed(agent, [*history, {"role": "user", "content": question}])
        async for _ in result.stream_events():
            pass
        history = result.to_input_list()


def agent(model: Any, **options: Any) -> Any:
    return Agent(name="Finder", instructions="Find the cat.", model=model, **options)


def completions(base_url: str) -> None:
    asyncio.run(talk(agent(completions_model(base_url))))


def completions_streamed(base_url: str) -> None:
    asyncio.run(talk_streamed(agent(completions_model(base_url))))


def completions_tools(base_url: str) -> None:
    finder = agent(completions_model(base_url), tools=[look])
    assert "cat" in asyncio.run(Runner.run(finder, "What is in the box?")).final_output


def completions_structured(base_url: str) -> None:
    answers = asyncio.run(talk(agent(completions_model(base_url), output_type=Guess)))
    assert [answer.number for answer in answers] == [7, 7, 7]


def responses(base_url: str) -> None:
    asyncio.run(talk(agent(responses_model(base_url))))


def responses_streamed(base_url: str) -> None:
    asyncio.run(talk_streamed(agent(responses_model(base_url))))


def responses_tools(base_url: str) -> None:
    finder = agent(responses_model(base_url), tools=[look])
    assert "cat" in asyncio.run(Runner.run(finder, "What is in the box?")).final_output


def responses_structured(base_url: str) -> None:
    answers = asyncio.run(talk(agent(responses_model(base_url), output_type=Guess)))
    assert [answer.number for answer in answers] == [7, 7, 7]


if __name__ == "__main__":
    set_tracing_disabled(True)
    run(
        completions,
        completions_streamed,
        completions_tools,
        completions_structured,
        responses,
        responses_streamed,
        responses_tools,
        responses_structured,
    )
