"""The tokens of rollouts of several turns, whose prompts only grow.

The module imports nothing of the project, because the peer's environment loads it too.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

TURNS = 5
GROWTH = 350
"""Tokens that a turn adds to the prompt; with TURNS turns the mean prompt is 1,000 tokens."""
ANSWER = 74
"""Sampled tokens per call, as in published measurements of long conversations."""
VOCABULARY = 32_000


@dataclass(frozen=True)
class Turn:
    """One call of a rollout; `number` counts from 0."""

    rollout: int
    number: int
    prompt: list[int]
    answer: list[int]
    logprobs: list[float]


def turns(rollouts: int, seed: int = 0) -> Iterator[Turn]:
    """Yield the turns of each rollout in order, one rollout after another."""
    for rollout in range(rollouts):
        random = Random(f"{seed}/{rollout}")
        prompt: list[int] = []
        for number in range(TURNS):
            prompt = prompt + random.choices(range(VOCABULARY), k=GROWTH)
            answer = random.choices(range(VOCABULARY), k=ANSWER)
            logprobs = [-random.expovariate(1.0) for _ in answer]
            yield Turn(rollout, number, prompt, answer, logprobs)
            prompt = prompt + answer
