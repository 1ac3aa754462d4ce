"""Pairs → texts that say which of two answers is better, as a judge of pairs is asked."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from adapters.harness.judges import comparison
from adapters.rendering.chat import Chat
from tasks.pairs.reading import read_sides
from tasks.texts.rules import Trained
from tasks.texts.source import RowTexts
from tasks.texts.tokenizing import WeightedTokens, tokenize


@dataclass(frozen=True)
class ComparedPairs(RowTexts):
    """Texts of the pairs of a split: each pair is compared in both orders; a tie makes none."""

    question: str

    def tokenize(
        self, row: Mapping[str, Any], chat: Chat, trained: Trained
    ) -> list[WeightedTokens]:
        if (read := read_sides(row)) is None:
            return []
        prompt, sides = read
        chosen, rejected = ({"messages": [*prompt, *side]} for side in sides)
        found: list[WeightedTokens] = []
        for verdict, shown in (("A", (chosen, rejected)), ("B", (rejected, chosen))):
            asked = {"role": "user", "content": comparison(self.question, *shown)}
            answer = {"role": "assistant", "content": verdict}
            found += tokenize({"messages": [asked, answer]}, chat, trained)
        return found
