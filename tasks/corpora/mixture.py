"""The formats in their shares → one endless, seeded stream of conversations."""

from collections.abc import Iterator, Mapping
from random import Random
from typing import Protocol

from tasks.corpora import arithmetic, guess_the_number, hello, tool_calls, twenty_questions
from tasks.corpora.chat import Chat
from tasks.corpora.conversation import Conversation, Exam


class Format(Protocol):
    def document(self, rng: Random, noise: float) -> Conversation: ...


class Examined(Format, Protocol):
    def exam(self, index: int) -> Exam: ...


Shares = Mapping[str, float]

FIRST_SHARES: Shares = {
    "hello": 0.30,
    "arithmetic": 0.25,
    "guess_the_number": 0.12,
    "twenty_questions": 0.18,
    "tool_calls": 0.07,
    "chat": 0.08,
}
"""Share of the documents, not of the tokens: a tool call reads ten times as long as a hello."""

GAME_SHARES: Shares = {
    "hello": 0.08,
    "arithmetic": 0.08,
    "guess_the_number": 0.06,
    "twenty_questions": 0.70,
    "tool_calls": 0.04,
    "chat": 0.04,
}
"""20 Questions is slow to learn: it has a table of facts to know by heart."""

LAST_SHARES: Shares = {
    "hello": 0.15,
    "arithmetic": 0.20,
    "guess_the_number": 0.10,
    "twenty_questions": 0.43,
    "tool_calls": 0.06,
    "chat": 0.06,
}
"""Once only answers are learnt: those of 20 Questions are few and short."""

NOISE = {
    "hello": hello.NOISE,
    "arithmetic": arithmetic.NOISE,
    "guess_the_number": guess_the_number.NOISE,
    "twenty_questions": twenty_questions.NOISE,
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
        "twenty_questions": twenty_questions.TwentyQuestions(),
        "tool_calls": tool_calls.ToolCalls(),
    }


def stream(seed: str, noise: float, shares: Shares = FIRST_SHARES) -> Iterator[Conversation]:
    """Conversations without end; `noise` scales NOISE: 0 is clean, 1 what the model ends with."""
    rng, formats = Random(seed), dict[str, Format](examined())
    formats["chat"] = Chat()
    while True:
        name = rng.choices(list(shares), list(shares.values()))[0]
        yield formats[name].document(rng, noise * NOISE[name])
