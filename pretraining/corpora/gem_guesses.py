"""Games of GEM's GuessTheNumber, in which a guess counts only in a \\boxed{}."""

import re
from collections.abc import Callable
from functools import cache
from random import Random

from pretraining.corpora.conversation import Conversation, Exam, draw
from ratchet.adapters.calls import JsonObject
from ratchet.adapters.harness.environments import Game, game_of

ENVIRONMENT = "game:GuessTheNumber-v0-easy"
HIGH = 10
WANDER = 0.5
"""Largest share of random turns, which the next guess must handle."""
SEEDS = 2**31
TRAIN, TEST = 256, 64
HINT = re.compile(r"is (higher|lower) than (\d+)")


def examples() -> list[JsonObject]:
    """Return the rows of datasets/gem_games.jsonl; each seed is one game."""
    return [
        {"seed": row, "split": "train" if row < TRAIN else "test"} for row in range(TRAIN + TEST)
    ]


class GemGuessesCorpus:
    """Games of the environment, played by halving the range."""

    def document(self, rng: Random, noise: float) -> Conversation:
        """Generate a game with mistakes; only a share `noise` of the turns trains on mistakes."""
        game, ignored = _environment()(rng.randrange(SEEDS)), set[int]()
        mistakes = max(noise, rng.random() * WANDER)
        while not game.over:
            chance, said = rng.random(), halving(game.messages)
            if chance < mistakes:
                said = _wrong(game.messages, rng, ends=chance < noise)
            if noise <= chance < mistakes:
                ignored.add(len(game.messages))
            game.step(said)
        return Conversation(game.messages[:-1], ignored=frozenset(ignored))

    def exam(self, index: int) -> Exam:
        game = _environment()(TRAIN + index % TEST)
        while not game.over:
            game.step((yield Conversation([*game.messages])))
        return sum(game.rewards)


def halving(messages: list[dict[str, str]]) -> str:
    """Return the guess that halves the remaining range."""
    low, high = 1, HIGH
    for message in messages[2::2]:
        for hint, number in HINT.findall(message["content"]):
            low = max(low, int(number) + 1) if hint == "higher" else low
            high = min(high, int(number) - 1) if hint == "lower" else high
    return f"From {low} to {high}. My guess is {_boxed((low + high) // 2)}."


def _wrong(messages: list[dict[str, str]], rng: Random, *, ends: bool) -> str:
    """Draw any guess or, if the mistake may end the game, an answer without a valid guess."""
    number, said = rng.randint(1, HIGH), [m["content"] for m in messages[1::2]]
    guess, repeated = f"My guess is {_boxed(number)}.", said[-1] if said else _boxed(number)
    if not ends:
        return rng.choice([guess, repeated])
    unboxed = f"My guess is {number}."
    return draw(rng, (45, guess), (15, repeated), (25, unboxed), (15, "I do not know."))


def _boxed(number: int) -> str:
    return f"\\boxed{{{number}}}"


@cache
def _environment() -> Callable[[int], Game]:
    return game_of(ENVIRONMENT)
