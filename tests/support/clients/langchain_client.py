"""LangChain's chat model for OpenAI: talks, streams, calls a tool, and parses."""
# LangChain is not installed where the types are checked.
# pyright: reportMissingImports=false

import os
from typing import Any

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from ways import QUESTIONS, run


class Guess(BaseModel):
    """A number, and why it is that one."""

    number: int
    why: str


def look(at: str) -> str:
    """Look at something."""
    return f"{at}: a cat"


def model(base_url: str) -> Any:
    return ChatOpenAI(model=os.environ["OPENAI_MODEL"], base_url=base_url)


def invoke(base_url: str) -> None:
    chat, messages = model(base_url), []
    for question in QUESTIONS:
        messages.append(HumanMessage(question))
        messages.append(chat.invoke(messages))


def stream(base_url: str) -> None:
    chat, messages = model(base_url), []
    for question in QUESTIONS:
        messages.append(HumanMessage(question))
        first, *rest = chat.stream(messages)
        messages.append(sum(rest, first))


def tools(base_url: str) -> None:
    chat = model(base_url).bind_tools([tool(look)])
    messages: list[Any] = [HumanMessage("What is in the box?")]
    while True:
        messages.append(chat.invoke(messages))
        if not messages[-1].tool_calls:
            break
        for call in messages[-1].tool_calls:
            messages.append(ToolMessage(look(**call["args"]), tool_call_id=call["id"]))


def structured(base_url: str) -> None:
    chat = model(base_url).with_structured_output(Guess, method="json_schema", include_raw=True)
    messages: list[Any] = []
    for question in QUESTIONS:
        messages.append(HumanMessage(question))
        answer = chat.invoke(messages)
        assert answer["parsed"].number == 7
        messages.append(answer["raw"])


if __name__ == "__main__":
    run(invoke, stream, tools, structured)
