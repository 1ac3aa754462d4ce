"""20 Questions as a CrewAI flow of a player, an answerer and an optional search.

The module also runs alone, against any OpenAI-compatible URL, and prints one game:

    OPENAI_BASE_URL=… OPENAI_API_KEY=… OPENAI_MODEL=… python agents/twenty_questions.py heron bird
"""

import asyncio
import os
import sys
from collections.abc import Mapping
from typing import Any, Literal

# CrewAI reads these at import: no telemetry, no version check, no tracing.
os.environ.setdefault("CREWAI_DISABLE_TELEMETRY", "true")
os.environ.setdefault("CREWAI_DISABLE_VERSION_CHECK", "true")
os.environ.setdefault("CREWAI_TRACING_ENABLED", "false")
os.environ.setdefault("CREWAI_TESTING", "true")

from crewai import LLM, Agent
from crewai.flow.flow import Flow, listen, router, start
from crewai.tools import BaseTool
from crewai.utilities.types import LLMMessage
from pydantic import BaseModel

TURNS = 20
LONGEST_QUERY = 500
TIMEOUT_SECONDS = 600
OPENING = (
    "We play 20 Questions. I think of a mammal, bird, fish, fruit, vegetable, tool, instrument, "
    "vehicle, clothing or furniture. Ask one short yes/no question, or guess, like: Is it a heron?"
)
STRATEGY = (
    "Ask about one property at a time, and first about those that halve what is left. Search at "
    "most once before a question. Say nothing but the question, in one line."
)
SECRET = (
    "You answer in a game of 20 Questions. The secret is: {answer} ({category}). Answer the "
    "question about it truthfully, in the word's usual sense: yes, no, or n/a where neither fits "
    "or nobody can know. It is correct if it names the secret itself, and nothing wider."
)
LOOK_UP = "Say in two to four sentences what is commonly known about this. Facts only."


class Verdict(BaseModel):
    # The docstring is part of the JSON schema that the answerer's prompt contains.
    """What the answerer returns."""

    reason: str
    yes_or_no: Literal["yes", "no", "n/a"]
    correct: bool


class Turn(BaseModel):
    """A question and its response."""

    question: str
    response: str


class Game(BaseModel):
    """The state of the flow."""

    answer: str = ""
    category: str = ""
    next_question: str = ""
    interactions: list[Turn] = []
    conversation: list[LLMMessage] = []
    correct: bool = False


class Search(BaseTool):
    """A search engine that a model plays."""

    name: str = "search"
    description: str = "Look something up: a short query in, a few sentences of facts out."
    llm: Any

    def _run(self, query: str) -> str:
        return self.llm.call([_system(LOOK_UP), _user(query[:LONGEST_QUERY])])


class TwentyQuestions(Flow[Game]):
    """One game, which the player sees as one growing conversation with its searches."""

    def __init__(self, player: LLM, answerer: LLM, search: LLM | None = None) -> None:
        super().__init__(suppress_flow_events=True)
        self.player, self.answerer = player, answerer
        self.searcher = _searcher(player, search) if search else None

    @start("next turn")
    async def ask_question(self) -> None:
        game = self.state
        told = game.interactions[-1].response if game.interactions else OPENING
        said, game.conversation = await self._said([*game.conversation, _user(told)])
        game.next_question = " ".join(said.split())

    @listen(ask_question)
    async def answer_question(self) -> None:
        game = self.state
        secret = SECRET.format(answer=game.answer, category=game.category)
        verdict = await self.answerer.acall([_system(secret), _user(game.next_question)])
        if not isinstance(verdict, Verdict):
            verdict = Verdict(reason="not understood", yes_or_no="n/a", correct=False)
        turn = Turn(question=game.next_question, response=verdict.yes_or_no)
        game.interactions.append(turn)
        game.correct = verdict.correct

    @router(answer_question)
    async def is_over(self) -> str:
        over = self.state.correct or len(self.state.interactions) == TURNS
        return "over" if over else "next turn"

    async def _said(self, conversation: list[LLMMessage]) -> tuple[str, list[LLMMessage]]:
        """Return the player's next message, and the conversation with it."""
        if self.searcher:
            return await _searched(self.searcher, conversation)
        said = str(await self.player.acall(conversation))
        return said, [*conversation, _assistant(said)]


async def play(
    example: dict[str, Any],
    *,
    base_url: str,
    api_key: str,
    model: str,
    roles: Mapping[str, Mapping[str, str]],
) -> float:
    """Return 1 for a right guess within the turns, else 0.

    `example` has the columns `answer` and `category`. The model asks, the role `answerer` answers,
    and the player may use the role `search` if there is one.
    """
    game = await played(example, {"player": _at(base_url, api_key, model), **roles})
    return float(game.correct)


async def played(example: dict[str, Any], roles: Mapping[str, Mapping[str, str]]) -> Game:
    """Play a game between these roles, each with a base_url, an api_key and a model."""
    player = _llm(**roles["player"], max_tokens=64)
    answerer = _llm(**roles["answerer"], response_format=Verdict)
    search = _llm(**roles["search"]) if "search" in roles else None
    flow = TwentyQuestions(player, answerer, search)
    try:
        await flow.kickoff_async({name: example[name] for name in ("answer", "category")})
    finally:
        await _closed(player, answerer)
    return flow.state


def _llm(*, base_url: str, api_key: str, model: str, **settings: Any) -> LLM:
    """Make a CrewAI LLM; `custom_openai` stops CrewAI from inferring the provider by name."""
    return LLM(
        model,
        custom_openai=True,
        base_url=base_url,
        api_key=api_key,
        timeout=TIMEOUT_SECONDS,
        **settings,
    )


async def _searched(
    searcher: Agent, conversation: list[LLMMessage]
) -> tuple[str, list[LLMMessage]]:
    try:
        output = await searcher.kickoff_async(conversation)
    except ValueError:  # CrewAI's error for an answer without text, which costs one turn
        return "", conversation
    _, *grown = output.messages  # without the system prompt, which every kickoff puts first
    return output.raw, grown


async def _closed(*models: Any) -> None:
    """Close the connections, which CrewAI leaves open after the end of their event loop."""
    for model in models:
        await model._async_client.close()


def _searcher(player: LLM, search: LLM) -> Agent:
    return Agent(
        role="20 Questions player",
        goal="Find out the secret within 20 questions.",
        backstory=STRATEGY,
        llm=player,
        tools=[Search(llm=search)],
        max_iter=3,
        verbose=False,
    )


def _at(base_url: str, api_key: str, model: str) -> dict[str, str]:
    return {"base_url": base_url, "api_key": api_key, "model": model}


def _system(content: str) -> LLMMessage:
    return {"role": "system", "content": content}


def _user(content: str) -> LLMMessage:
    return {"role": "user", "content": content}


def _assistant(content: str) -> LLMMessage:
    return {"role": "assistant", "content": content}


def main() -> None:
    """Play the noun and category of the command line, with the addresses in the environment.

    A role without variables of its own, such as ANSWERER_BASE_URL, uses OPENAI_BASE_URL and so on.
    SEARCH_MODEL adds a search.
    """
    answer, category = sys.argv[1:]
    example = {"answer": answer, "category": category}
    roles = {role: _from_environment(role) for role in ("player", "answerer")}
    if "SEARCH_MODEL" in os.environ:
        roles["search"] = _from_environment("search")
    game = asyncio.run(played(example, roles))
    lines = [f"{turn.question} {turn.response}" for turn in game.interactions]
    print("\n".join([*lines, str(float(game.correct))]))  # noqa: T201  It runs alone here.


def _from_environment(role: str) -> dict[str, str]:
    def of(name: str) -> str:
        return os.environ.get(f"{role.upper()}_{name}") or os.environ[f"OPENAI_{name}"]

    return _at(of("BASE_URL"), of("API_KEY"), of("MODEL"))


if __name__ == "__main__":
    main()
