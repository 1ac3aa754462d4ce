"""Pairs → what teaches and tries a judge: which of two answers is better, as it is asked."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from adapters.calls import Message
from adapters.harness.judges import comparison
from adapters.rendering.chat import Chat
from adapters.rewards import BETTER
from tasks.algorithm.preferences import CHOSEN, REJECTED
from tasks.examples.reading import DatasetError, Example, Source
from tasks.given.given import Unit, WrittenUnits
from tasks.given.sides import Sides, read_sides
from tasks.given.tokenizing import WeightedTokens, tokenize


@dataclass(frozen=True)
class ComparedPairs(WrittenUnits):
    """Texts of the pairs of a split: each pair is compared in both orders; a tie makes none."""

    question: str

    def read(self, row: Mapping[str, Any], chat: Chat) -> Unit:
        if (read := read_sides(row)) is None:
            return Unit({})
        chosen, rejected = ({"messages": messages} for messages in _conversations(read))
        found: list[WeightedTokens] = []
        for verdict, shown in (("A", (chosen, rejected)), ("B", (rejected, chosen))):
            asked = {"role": "user", "content": comparison(self.question, *shown)}
            answer = {"role": "assistant", "content": verdict}
            found += tokenize({"messages": [asked, answer]}, chat, "assistant")
        return Unit({"": found})


@dataclass(frozen=True)
class ComparedExamples(Source):
    """Examples of a judge: the two sides of each pair, with BETTER; a tie makes none."""

    question: str = ""

    def examples(self) -> list[Example]:
        return [
            {**row, "example": self._example(sides, row["example_id"])}
            for row in super().examples()
            if (sides := self._sides(row)) is not None
        ]

    def _sides(self, row: Example) -> list[dict[str, Any]] | None:
        try:
            read = read_sides(row["example"])
        except DatasetError as error:
            raise DatasetError(f"row {row['example_id']} of {self.dataset}: {error}") from error
        if read is None:
            return None
        named = zip((CHOSEN, REJECTED), _conversations(read), strict=True)
        return [{"id": name, "messages": messages} for name, messages in named]

    def _example(self, sides: list[dict[str, Any]], number: int) -> dict[str, Any]:
        """Return a pair as a judge is shown it: in half of them the better side is the second."""
        shown = sides if number % 2 else sides[::-1]
        return {"rollouts": shown, "question": self.question, BETTER: CHOSEN}


def _conversations(read: Sides) -> list[list[Message]]:
    """Return the conversation of each side."""
    prompt, sides = read
    return [[one.message for one in (*prompt, *side)] for side in sides]
