"""Games of GEM's GuessTheNumber, in which a guess counts only in a \\boxed{}."""

import re
from functools import cache
from random import Random
from typing import Any

from adapters.calls import JsonObject
from adapters.harness.environments.gem import Game, game_of
from pretraining.corpora.conversation import Conversation, Exam

ENVIRONMENT = "game:GuessTheNumber-v0-easy"
HIGH, GUESSES = 10, 4
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
        game, ignored = _start_game(rng.randrange(SEEDS)), set[int]()
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
        game = _start_game(TRAIN + index % TEST)
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
    guesses = [f"My guess is {_boxed(number)}.", said[-1] if said else f"{_boxed(number)}"]
    if not ends:
        return rng.choice(guesses)
    nothing = [f"My guess is {number}.", "I do not know."]
    return rng.choices([*guesses, *nothing], weights=[45, 15, 25, 15])[0]


def _boxed(number: int) -> str:
    return f"\\boxed{{{number}}}"


def _start_game(seed: int) -> Game:
    return _environment()(seed)


@cache
def _environment() -> Any:
    return game_of(ENVIRONMENT)
