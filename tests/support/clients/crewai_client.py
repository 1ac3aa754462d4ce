"""CrewAI, by its own OpenAI client and through LiteLLM: calls, and agents with a tool."""

import os
from typing import Any

# Before the import: it would report to others, and write into the home folder.
os.environ |= {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_DISABLE_VERSION_CHECK": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "CREWAI_TESTING": "true",
    "CREWAI_STORAGE_DIR": os.environ["TMPDIR"],
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}

from crewai import LLM, Agent
from crewai.tools import tool
from pydantic import BaseModel
from ways import QUESTIONS, run

MODEL = os.environ["OPENAI_MODEL"]


class Guess(BaseModel):
    number: int
    why: str


@tool
def look(at: str) -> str:
    """Look at something."""
    return f"{at}: a cat"


def llm(base_url: str, model: str = f"openai/{MODEL}", **options: Any) -> Any:
    return LLM(model=model, base_url=base_url, api_key=os.environ["OPENAI_API_KEY"], **options)


def talk(model: Any) -> list[Any]:
    messages: Any = []
    answers = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        answers.append(model.call(messages))
        said = answers[-1].model_dump_json() if isinstance(answers[-1], Guess) else answers[-1]
        messages.append({"role": "assistant", "content": said})
    return answers


def agent_looks(model: Any) -> None:
    agent = Agent(
        role="Finder", goal="Find the cat.", backstory="Curious.", tools=[look], llm=model
    )
    answer: Any = agent.kickoff("What is in the box?")
    assert "cat" in answer.raw


def call(base_url: str) -> None:
    talk(llm(base_url))


def streaming(base_url: str) -> None:
    talk(llm(base_url, stream=True))


def structured(base_url: str) -> None:
    answers = talk(llm(base_url, response_format=Guess))
    assert [answer.number for answer in answers] == [7, 7, 7]


def native_tools(base_url: str) -> None:
    agent_looks(llm(base_url))


def react(base_url: str) -> None:
    """Ask through LiteLLM: it sends the stop string, and no tools to a model it does not know."""
    agent_looks(llm(base_url, is_litellm=True))


def react_without_stop(base_url: str) -> None:
    """Ask by CrewAI's own client, which sends no stop string, and no tools to a model named o1."""
    agent_looks(llm(base_url, model="openai/solo1"))


if __name__ == "__main__":
    run(call, streaming, structured, native_tools, react, react_without_stop)
