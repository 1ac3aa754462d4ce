"""Games of 20 Questions from a table of nouns and facts, each one growing conversation."""

import csv
import re
from functools import cache
from random import Random

from pretraining.corpora.conversation import Conversation, Exam, assistant, draw, user, with_article
from ratchet.adapters.project.modules import EXAMPLES

TABLE = EXAMPLES / "datasets" / "twenty_questions.csv"
TURNS = 20
WANDER = 0.6
"""Largest share of random turns, which the next question must handle."""
FEW = 3
"""Number of remaining nouns that are guessed one by one."""
FIRST = ("Is it alive?", "Is it food?")

Told = dict[str, str]
"""Questions with their answers, oldest first."""


@cache
def nouns() -> list[dict[str, str]]:
    """Read datasets/twenty_questions.csv: answer, category, split, then one column per fact."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@cache
def facts() -> list[str]:
    """Return the columns that are questions."""
    return [column for column in nouns()[0] if column.endswith("?")]


@cache
def categories() -> list[str]:
    return list(dict.fromkeys(noun["category"] for noun in nouns()))


def opening() -> str:
    *first, last = categories()
    return (
        f"We play 20 Questions. I think of a {', '.join(first)} or {last}. "
        "Ask one short yes/no question, or guess, like: Is it a heron?"
    )


def guessed(asked: str) -> str | None:
    """Return the noun of a guess such as "Is it a heron?"."""
    found = re.fullmatch(r"\s*is it an? ([a-z]+)\?\s*", asked.lower())
    return found[1] if found else None


def answer_to(asked: str, noun: dict[str, str]) -> tuple[str, bool]:
    """Return the table's answer, yes, no or n/a, and True if this was the right guess."""
    guess = guessed(asked)
    if guess == noun["answer"]:
        return "yes", True
    known = {fact.lower(): fact for fact in facts()}.get(asked.strip().lower())
    if known:
        return noun[known], False
    return ("no" if guess else "n/a"), False


class TwentyQuestionsCorpus:
    """Games of an expert that halves the remaining nouns, then guesses, in a fixed order.

    The expert uses only answers to its own questions and ignores all others, so the games of one
    noun differ only in their mistakes.
    """

    def __init__(self) -> None:
        self._nouns = nouns()
        self._category = [self._bits_of("category", name) for name in categories()]
        self._structure = [
            fact
            for fact in facts()
            if fact in FIRST or self._bits_of(fact, "yes") in self._category
        ]
        """Facts that tell categories apart: the first ones, and those of one whole category."""
        self._masks = {
            (fact, value): self._bits_of(fact, value)
            for fact in facts()
            for value in ("yes", "no", "n/a")
        }
        self._asked = dict[int, str | None]()

    def document(self, rng: Random, noise: float) -> Conversation:
        """Generate a game with mistakes; only a share `noise` of the turns trains on mistakes."""
        noun, told = rng.choice(self._nouns), Told()
        messages, ignored = [user(opening())], set[int]()
        mistakes = max(noise, rng.random() * WANDER)
        for _ in range(TURNS):
            chance, said = rng.random(), self.expert(told)
            if chance < mistakes:
                said = _anything(told, rng)
            if noise <= chance < mistakes:
                ignored.add(len(messages))
            answer, correct = answer_to(said, noun)
            messages += [assistant(said), user(answer)]
            if correct:
                break
            told[said] = answer
        return Conversation(messages[:-1], ignored=frozenset(ignored))

    def expert(self, told: Told) -> str:
        left = (1 << len(self._nouns)) - 1
        while (fact := self._fact(left)) in told:
            left &= self._masks[fact, told[fact]]
        if fact:
            return fact
        among = (noun for row, noun in enumerate(self._nouns) if left >> row & 1)
        return next(said for noun in among if (said := guess(noun)) not in told)

    def exam(self, index: int) -> Exam:
        held_out = [noun for noun in self._nouns if noun["split"] == "test"]
        noun, messages = held_out[index % len(held_out)], [user(opening())]
        for _ in range(TURNS):
            asked = (yield Conversation(messages)).strip()
            answer, correct = answer_to(asked, noun)
            if correct:
                return 1.0
            messages = [*messages, assistant(asked), user(answer)]
        return 0.0

    def _fact(self, left: int) -> str | None:
        """Return the question that halves these nouns best, categories first; None for few."""
        if left not in self._asked:
            within = any(left & ~category == 0 for category in self._category)
            best = max(facts() if within else self._structure, key=lambda f: self._halves(f, left))
            few = within and left.bit_count() <= FEW
            self._asked[left] = None if few or not self._halves(best, left) else best
        return self._asked[left]

    def _halves(self, fact: str, left: int) -> int:
        """Count the nouns that the less likely answer would leave."""
        yes = (left & self._masks[fact, "yes"]).bit_count()
        return min(yes, left.bit_count() - yes)

    def _bits_of(self, column: str, value: str) -> int:
        return sum(1 << row for row, noun in enumerate(self._nouns) if noun[column] == value)


def _anything(told: Told, rng: Random) -> str:
    return draw(
        rng,
        (3, guess(rng.choice(nouns()))),
        (3, rng.choice(facts())),
        (2, rng.choice(list(told) or facts())),
        (92, "I do not know."),
    )


def guess(noun: dict[str, str]) -> str:
    return f"Is it {with_article(noun['answer'])}?"
