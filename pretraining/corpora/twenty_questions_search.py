"""Games of 20 Questions as CrewAI's agent with a search tool plays them.

The agent puts a system prompt and a tool before the game, and a prefix before each user message.
"""

from random import Random

from pretraining.corpora.conversation import Conversation, Exam, assistant, user
from pretraining.corpora.tool_calls import call, parse_call
from pretraining.corpora.twenty_questions import WANDER, TwentyQuestionsCorpus, facts, nouns
from ratchet.adapters.calls import Tool

SYSTEM = (
    "You are 20 Questions player. Ask about one property at a time, and first about those that "
    "halve what is left. Search at most once before a question. Say nothing but the question, in "
    "one line.\nYour personal goal is: Find out the secret within 20 questions."
)
SEARCH: Tool = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Look something up: a short query in, a few sentences of facts out.",
        "strict": True,
        "parameters": {
            "properties": {"query": {"type": "string"}},
            "required": ["query"],
            "type": "object",
            "additionalProperties": False,
        },
    },
}
SEARCHES = 0.2
"""Number of searches per mistake. Searches look up random nouns; the expert needs none."""
MOST_SEARCHES = 2
"""Largest number of searches before one question."""


class TwentyQuestionsSearchCorpus:
    """The games of 20 Questions, with searches."""

    def __init__(self) -> None:
        self._game = TwentyQuestionsCorpus()

    def document(self, rng: Random, noise: float) -> Conversation:
        game = self._game.document(rng, noise)
        searches = max(noise, rng.random() * WANDER) * SEARCHES
        messages, ignored = [_system()], set[int]()
        for place, said in enumerate(game.messages):
            if said["role"] == "user":
                messages.append(_task(said))
                continue
            chance = rng.random()
            if noise * SEARCHES <= chance < searches:
                ignored.add(len(messages))
            if chance < searches:
                messages += _search(rng.choice(nouns())["answer"])
            if place in game.ignored:
                ignored.add(len(messages))
            messages.append(said)
        return Conversation(messages, [SEARCH], frozenset(ignored))

    def exam(self, index: int) -> Exam:
        game = self._game.exam(index)
        messages, prompt = [_system()], next(game)
        while True:
            messages = [*messages, _task(prompt.messages[-1])]
            said = yield Conversation(messages, [SEARCH])
            for _ in range(MOST_SEARCHES):
                if (query := parse_query(said)) is None:
                    break
                messages = [*messages, *_search(query)]
                said = yield Conversation(messages, [SEARCH])
            messages = [*messages, assistant(said)]
            try:
                prompt = game.send(said)
            except StopIteration as finished:
                return finished.value


def parse_query(said: str) -> str | None:
    match parse_call(said):
        case {"name": "search", "arguments": {"query": str(query)}}:
            return query
    return None


def search_result(query: str) -> str:
    noun = next((noun for noun in nouns() if noun["answer"] == query), None)
    if noun is None:
        return "Nothing was found."
    true = " ".join(fact for fact in facts() if noun[fact] == "yes")
    return f"{noun['answer']} ({noun['category']}): yes to {true}"


def _search(query: str) -> list[dict[str, str]]:
    return [
        assistant(call("search", {"query": query})),
        {"role": "tool", "content": search_result(query)},
    ]


def _system() -> dict[str, str]:
    return {"role": "system", "content": SYSTEM}


def _task(told: dict[str, str]) -> dict[str, str]:
    return user(f"\nCurrent Task: {told['content']}")
