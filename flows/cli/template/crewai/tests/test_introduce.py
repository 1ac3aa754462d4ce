"""The flow of `introduce`, without a model. Run it in the project's folder, by `pytest`."""

import asyncio
from typing import Any

import introduce
import pytest


class Repeating:
    """A stand-in for CrewAI's LLM, which always says the same."""

    def __init__(self, said: str) -> None:
        self.said = said

    async def acall(self, _: str) -> str:
        return self.said


@pytest.mark.parametrize(("said", "reward"), [("Well, I am an owl.", 1.0), ("Who?", 0.0)])
def test_the_flow_scores_what_was_said(said: str, reward: float) -> None:
    llm: Any = Repeating(said)
    flow = introduce.Introducing(llm)
    asyncio.run(flow.kickoff_async(inputs={"identity": "an owl"}))
    assert flow.state.reward == reward
