"""The formats in their shares → one endless, seeded stream of conversations."""

from collections.abc import Iterator, Mapping
from random import Random
from typing import Protocol

from pretraining.corpora import (
    arithmetic,
    gem_guesses,
    guess_the_number,
    hello,
    tool_calls,
    twenty_questions,
    twenty_questions_search,
)
from pretraining.corpora.conversation import Conversation, Exam
from pretraining.corpora.small_talk import Chat


class Format(Protocol):
    def document(self, rng: Random, noise: float) -> Conversation: ...


class Examined(Format, Protocol):
    def exam(self, index: int) -> Exam: ...


Shares = Mapping[str, float]

FIRST_SHARES: Shares = {
    "hello": 0.32,
    "arithmetic": 0.25,
    "guess_the_number": 0.11,
    "gem_guesses": 0.03,
    "twenty_questions": 0.12,
    "twenty_questions_search": 0.03,
    "tool_calls": 0.07,
    "chat": 0.07,
}
"""Share of the documents, not of the tokens: a game reads ten times as long as a hello."""

LAST_SHARES: Shares = {
    "hello": 0.19,
    "arithmetic": 0.24,
    "guess_the_number": 0.11,
    "gem_guesses": 0.07,
    "twenty_questions": 0.18,
    "twenty_questions_search": 0.08,
    "tool_calls": 0.07,
    "chat": 0.06,
}
"""Once only answers are learnt: a game's are most of its tokens."""

NOISE = {
    "hello": hello.NOISE,
    "arithmetic": arithmetic.NOISE,
    "guess_the_number": guess_the_number.NOISE,
    "gem_guesses": gem_guesses.NOISE,
    "twenty_questions": twenty_questions.NOISE,
    "twenty_questions_search": twenty_questions_search.NOISE,
    "tool_calls": tool_calls.NOISE,
    "chat": 0.0,
}
"""Share of wrong answers that the finished model has read last: what RL is to find out."""


def examined() -> dict[str, Examined]:
    """The formats that have a reward."""
    return {
        "hello": hello.Hello(),
        "arithmetic": arithmetic.Arithmetic(),
        "guess_the_number": guess_the_number.GuessTheNumber(),
        "gem_guesses": gem_guesses.GemGuesses(),
        "twenty_questions": twenty_questions.TwentyQuestions(),
        "twenty_questions_search": twenty_questions_search.TwentyQuestionsWithSearch(),
        "tool_calls": tool_calls.ToolCalls(),
    }


def stream(seed: str, noise: float, shares: Shares = FIRST_SHARES) -> Iterator[Conversation]:
    """Conversations without end; `noise` scales NOISE: 0 is clean, 1 what the model ends with."""
    rng, formats = Random(seed), dict[str, Format](examined())
    formats["chat"] = Chat()
    while True:
        name = rng.choices(list(shares), list(shares.values()))[0]
        yield formats[name].document(rng, noise * NOISE[name])
