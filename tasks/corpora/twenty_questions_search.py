"""A table of nouns and facts → turns of 20 Questions as CrewAI's agent with a search asks for them.

It puts a system prompt and a tool before the game, and a few words into its last message.
"""

from random import Random
from typing import Any

from tasks.corpora.conversation import Conversation, assistant, user
from tasks.corpora.tool_calls import call
from tasks.corpora.twenty_questions import WANDER, TwentyQuestions, facts, nouns

SYSTEM = (
    "You are 20 Questions player. Ask about one property at a time, and first about those that "
    "halve what is left. Search at most once before a question. Say nothing but the question, in "
    "one line.\nYour personal goal is: Find out the secret within 20 questions."
)
SEARCH: dict[str, Any] = {
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
"""Share of the mistakes that look up any noun: the expert has no need to."""


class TwentyQuestionsWithSearch:
    def __init__(self) -> None:
        self._game = TwentyQuestions()

    def document(self, rng: Random, noise: float) -> Conversation:
        """A turn of a game; after a search it is two answers, the search and the question."""
        game = self._game.document(rng, noise)
        last = rng.randrange(1, len(game.messages), 2)
        *before, asked, answered = game.messages[: last + 1]
        messages = [
            {"role": "system", "content": SYSTEM},
            *before,
            user(f"\nCurrent Task: {asked['content']}"),
        ]
        learnt = set[int]()
        if rng.random() < max(noise, rng.random() * WANDER) * SEARCHES:
            learnt |= {len(messages)} if noise else set()
            messages += _search(rng)
        learnt |= {len(messages)} if last not in game.ignored else set()
        messages.append(answered)
        answers = (at for at, said in enumerate(messages) if said["role"] == "assistant")
        return Conversation(messages, [SEARCH], frozenset(answers) - learnt)


def described(noun: dict[str, str]) -> str:
    """What a search finds of a noun."""
    true = " ".join(fact for fact in facts() if noun[fact] == "yes")
    return f"{noun['answer']} ({noun['category']}): yes to {true}"


def _search(rng: Random) -> list[dict[str, Any]]:
    noun = rng.choice(nouns())
    return [
        assistant(call("search", {"query": noun["answer"]})),
        {"role": "tool", "content": described(noun)},
    ]
