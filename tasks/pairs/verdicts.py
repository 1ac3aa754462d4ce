"""Pairs → texts that say which of two answers is better, as a judge of pairs is asked."""

from collections.abc import Iterator
from dataclasses import dataclass

from adapters.harness.judges import comparison
from adapters.rendering.chat import Chat
from tasks.examples.reading import DatasetError, Source
from tasks.pairs.reading import read_sides
from tasks.texts.rules import Trained
from tasks.texts.tokenizing import WeightedTokens, tokenize


@dataclass(frozen=True)
class ComparedPairs:
    """Texts of the pairs of a split: each pair is compared in both orders; a tie makes none."""

    rows: Source
    question: str

    @property
    def name(self) -> str:
        return f"the split '{self.rows.split}' of {self.rows.dataset}"

    def __len__(self) -> int:
        return len(self.rows.examples())

    def sequences(self, chat: Chat, trained: Trained) -> Iterator[tuple[int, list[WeightedTokens]]]:
        for row in self.rows.examples():
            number = row["example_id"]
            try:
                read = read_sides(row["example"])
            except DatasetError as error:
                raise DatasetError(f"row {number} of {self.rows.dataset}: {error}") from error
            found: list[WeightedTokens] = []
            if read is not None:
                prompt, sides = read
                chosen, rejected = ({"messages": [*prompt, *side]} for side in sides)
                for verdict, shown in (("A", (chosen, rejected)), ("B", (rejected, chosen))):
                    asked = {"role": "user", "content": comparison(self.question, *shown)}
                    answer = {"role": "assistant", "content": verdict}
                    found += tokenize({"messages": [asked, answer]}, chat, trained)
            yield number, found
