"""The mixture of all corpora: one endless, seeded stream of conversations."""

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
from pretraining.corpora.small_talk import SmallTalkCorpus


class Corpus(Protocol):
    """A generator of documents; a share `noise` of the answers is wrong."""

    def document(self, rng: Random, noise: float) -> Conversation: ...


class ExaminedCorpus(Corpus, Protocol):
    """A corpus with held-out examples."""

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
"""Shares of documents, not of tokens: a game is ten times as long as a hello."""

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
"""Shares for the phases that train on answers only, which are most of a game's tokens."""

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
"""Share of wrong answers in the last phase, which RL is to remove."""


def examined_corpora() -> dict[str, ExaminedCorpus]:
    """Return the corpora that have a reward, by name."""
    return {
        "hello": hello.HelloCorpus(),
        "arithmetic": arithmetic.ArithmeticCorpus(),
        "guess_the_number": guess_the_number.GuessTheNumberCorpus(),
        "gem_guesses": gem_guesses.GemGuessesCorpus(),
        "twenty_questions": twenty_questions.TwentyQuestionsCorpus(),
        "twenty_questions_search": twenty_questions_search.TwentyQuestionsSearchCorpus(),
        "tool_calls": tool_calls.ToolCallsCorpus(),
    }


def stream(seed: str, noise: float, shares: Shares = FIRST_SHARES) -> Iterator[Conversation]:
    """Yield conversations without end; `noise` scales NOISE: 0 is clean, 1 is the last phase's."""
    rng, corpora = Random(seed), dict[str, Corpus](examined_corpora())
    corpora["chat"] = SmallTalkCorpus()
    while True:
        name = rng.choices(list(shares), list(shares.values()))[0]
        yield corpora[name].document(rng, noise * NOISE[name])
