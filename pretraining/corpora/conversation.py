"""The record that every corpus generates: a conversation, and the answers to train on."""

from collections.abc import Generator
from dataclasses import dataclass, field
from random import Random

from ratchet.adapters.calls import Tool


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages that end with an answer (a document) or a question (a prompt)."""

    messages: list[dict[str, str]]
    tools: list[Tool] = field(default_factory=list)
    ignored: frozenset[int] = frozenset()
    """Positions of answers that are context only: they get no loss."""


Exam = Generator[Conversation, str, float]
"""A held-out example in play: it yields prompts, receives answers and returns the reward."""


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def draw(rng: Random, *weighted: tuple[float, str]) -> str:
    """Draw one of the texts, each of which stands behind its weight."""
    weights, texts = zip(*weighted, strict=True)
    return rng.choices(texts, weights)[0]


def words(text: str) -> list[str]:
    return text.split()
