"""A table of nouns and facts → turns of 20 Questions, each a fresh prompt with its history."""

import csv
import re
from functools import cache
from pathlib import Path
from random import Random

from tasks.corpora.conversation import Conversation, Exam, assistant, user, with_article

TABLE = Path(__file__).parents[2] / "datasets" / "twenty_questions.csv"
TURNS = 20
NOISE = 0.3
WANDER = 0.25
"""Share of the earlier turns that are anything: the next question must cope with them."""
OPENING = ("Is it alive?", "Is it food?")

History = list[tuple[str, str]]
"""Questions with their answers, oldest first."""


@cache
def nouns() -> list[dict[str, str]]:
    """The rows of datasets/twenty_questions.csv: answer, category, split, then a column a fact."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@cache
def facts() -> list[str]:
    """The columns that are questions."""
    return [column for column in nouns()[0] if column.endswith("?")]


@cache
def categories() -> list[str]:
    return list(dict.fromkeys(noun["category"] for noun in nouns()))


def question(history: History) -> str:
    """What the player is sent at turn len(history) + 1."""
    *first, last = categories()
    lines = [
        f"We play 20 Questions. I think of a {', '.join(first)} or {last}. "
        "Ask one short yes/no question, or guess, like: Is it a heron?",
        *(f"{asked} {answer}" for asked, answer in history),
        f"Question {len(history) + 1} of {TURNS}:",
    ]
    return "\n".join(lines)


def guessed(asked: str) -> str | None:
    """The noun of an "Is it a heron?"."""
    found = re.fullmatch(r"\s*is it an? ([a-z]+)\?\s*", asked.lower())
    return found[1] if found else None


def answer_to(asked: str, noun: dict[str, str]) -> tuple[str, bool]:
    """What the table says: yes, no or n/a; and whether this was the right guess."""
    guess = guessed(asked)
    if guess == noun["answer"]:
        return "yes", True
    known = {fact.lower(): fact for fact in facts()}.get(asked.strip().lower())
    if known:
        return noun[known], False
    return ("no" if guess else "n/a"), False


class TwentyQuestions:
    """An expert that knows the table: it halves what is left, then guesses."""

    def __init__(self) -> None:
        self._nouns = nouns()
        self._structure = [fact for fact in facts() if fact in OPENING or self._by_category(fact)]
        self._masks = {
            (fact, value): sum(1 << i for i, noun in enumerate(nouns()) if noun[fact] == value)
            for fact in facts()
            for value in ("yes", "no", "n/a")
        }
        self._category = {
            name: sum(1 << i for i, noun in enumerate(nouns()) if noun["category"] == name)
            for name in categories()
        }
        self._bits = {guess(noun): 1 << i for i, noun in enumerate(nouns())}

    def document(self, rng: Random, noise: float) -> Conversation:
        """One turn of a game, its history being partly expert and partly anything."""
        noun = rng.choice(self._nouns)
        turn, history = rng.randrange(TURNS - 2), list[tuple[str, str]]()
        asked = self.expert(history, rng)
        while len(history) < turn:
            said = self._anything(history, rng) if rng.random() < WANDER else asked
            answer, correct = answer_to(said, noun)
            if correct:
                break
            history.append((said, answer))
            asked = self.expert(history, rng)
        if rng.random() < noise:
            asked = self._anything(history, rng)
        return Conversation([user(question(history)), assistant(asked)])

    def expert(self, history: History, rng: Random) -> str:
        left = self._left(history)
        if not any(left & ~mask == 0 for mask in self._category.values()):
            return max(self._structure, key=lambda fact: self._halves(fact, left))
        splits = {fact: self._halves(fact, left) for fact in facts()}
        splits = {fact: half for fact, half in splits.items() if half}
        if left.bit_count() > 3 and splits:
            return rng.choices(list(splits), [half**2 for half in splits.values()])[0]
        return rng.choice([asked for asked, bit in self._bits.items() if bit & left])

    def exam(self, index: int) -> Exam:
        held_out = [noun for noun in self._nouns if noun["split"] == "test"]
        noun, history = held_out[index % len(held_out)], list[tuple[str, str]]()
        while len(history) < TURNS:
            asked = (yield Conversation([user(question(history))])).strip()
            answer, correct = answer_to(asked, noun)
            if correct:
                return 1.0
            history.append((asked, answer))
        return 0.0

    def _left(self, history: History) -> int:
        """The nouns, as bits, that agree with every answer."""
        left = (1 << len(self._nouns)) - 1
        for asked, answer in history:
            if asked in self._bits:
                left &= ~self._bits[asked]
            else:
                left &= self._masks.get((asked, answer), left)
        return left

    def _halves(self, fact: str, left: int) -> int:
        """How many nouns the less likely answer would leave."""
        yes = (left & self._masks[fact, "yes"]).bit_count()
        return min(yes, left.bit_count() - yes)

    def _anything(self, history: History, rng: Random) -> str:
        said = [asked for asked, _ in history]
        return rng.choices(
            [
                self._near_guess(history, rng),
                guess(rng.choice(self._nouns)),
                rng.choice(facts()),
                rng.choice(self._structure),
                rng.choice(said or facts()),
                "I do not know.",
            ],
            weights=[40, 5, 15, 15, 15, 10],
        )[0]

    def _near_guess(self, history: History, rng: Random) -> str:
        """Any noun of a category that is still possible, asked before or ruled out or not."""
        left = self._left(history)
        mask = rng.choice([mask for mask in self._category.values() if mask & left])
        return rng.choice([asked for asked, bit in self._bits.items() if bit & mask])

    def _by_category(self, fact: str) -> bool:
        """Whether the answer is yes for one whole category and for nothing else."""
        return {noun["category"] for noun in self._nouns if noun[fact] == "yes"} in [
            {name}
            for name in categories()
            if all(noun[fact] == "yes" for noun in self._nouns if noun["category"] == name)
        ]


def guess(noun: dict[str, str]) -> str:
    return f"Is it {with_article(noun['answer'])}?"
