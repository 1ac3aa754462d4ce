"""Made-up tokens of rollouts of several turns, whose prompts only grow.

This module imports nothing of the project, since the peer's environment reads it too.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

TURNS = 5
GROWTH = 350
"""Tokens that a turn adds to the prompt before its answer; the mean prompt has 1,000."""
ANSWER = 74
"""Tokens of an answer."""
VOCABULARY = 32_000


@dataclass(frozen=True)
class Turn:
    """One call; `number` counts from 0 in its rollout."""

    rollout: int
    number: int
    prompt: list[int]
    answer: list[int]
    logprobs: list[float]


def make_turns(rollouts: int, seed: int = 0, turns: int = TURNS) -> Iterator[Turn]:
    """Yield the turns of each rollout in order, one rollout after another."""
    for rollout in range(rollouts):
        random = Random(f"{seed}/{rollout}")
        prompt: list[int] = []
        for number in range(turns):
            prompt = prompt + random.choices(range(VOCABULARY), k=GROWTH)
            answer = random.choices(range(VOCABULARY), k=ANSWER)
            logprobs = [-random.expovariate(1.0) for _ in answer]
            yield Turn(rollout, number, prompt, answer, logprobs)
            prompt = prompt + answer
