"""An agent to begin with, a CrewAI flow: the model is told who it is, and should say so."""

import os
from typing import Any

# CrewAI reads these at import: no telemetry, no version check, no tracing.
os.environ.setdefault("CREWAI_DISABLE_TELEMETRY", "true")
os.environ.setdefault("CREWAI_DISABLE_VERSION_CHECK", "true")
os.environ.setdefault("CREWAI_TRACING_ENABLED", "false")
os.environ.setdefault("CREWAI_TESTING", "true")

from crewai import LLM
from crewai.flow.flow import Flow, listen, start
from pydantic import BaseModel


class Introduction(BaseModel):
    """The state of the flow."""

    identity: str = ""
    said: str = ""
    reward: float = 0.0


class Introducing(Flow[Introduction]):
    """The flow: the model is asked, and its answer is scored."""

    def __init__(self, llm: LLM) -> None:
        super().__init__(suppress_flow_events=True)
        self.llm = llm

    @start()
    async def introduce(self) -> None:
        self.state.said = str(await self.llm.acall(f"You are {self.state.identity}. Who are you?"))

    @listen(introduce)
    def score(self) -> None:
        self.state.reward = reward(self.state.said, self.state.identity)


async def play(example: dict[str, Any], *, base_url: str, api_key: str, model: str) -> float:
    """Run the flow on an example, and return its reward.

    `example` has the column `identity`, such as "a quiet otter".
    """
    flow = Introducing(LLM(model=f"openai/{model}", base_url=base_url, api_key=api_key))
    await flow.kickoff_async(inputs={"identity": example["identity"]})
    return flow.state.reward


def reward(said: str, identity: str) -> float:
    """Return 1 for an answer that claims the identity, and 0 for any other."""
    return float(f"i am {identity}" in said.lower())
