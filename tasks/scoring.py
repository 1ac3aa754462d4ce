"""tokens × another policy → what it finds at the places where a token is trained.

The other policy is a reference, a teacher, or the sampler of the policy that is trained.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Protocol, TypeVar

import numpy as np

SCORED_AT_ONCE = 256
"""Sequences that another policy is asked for at once; it computes them in parallel."""

Asked = TypeVar("Asked")
Found = TypeVar("Found")


class Reference(Protocol):
    """Policy that gives log-probabilities, as `adapters.tinker.service.PatientSampler` does."""

    def score(self, sequences: Sequence[Sequence[int]], last: Sequence[int]) -> list[np.ndarray]:
        """Return the log-probabilities of the `last[i]` last tokens of sequence i."""
        ...


class LikeliestScorer(Protocol):
    """Policy that gives its likeliest tokens, as `adapters.tinker.service.PatientSampler` does."""

    def score_likeliest(
        self, sequences: Sequence[Sequence[int]], last: Sequence[int], k: int
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the k likeliest tokens at the `last` places of each sequence."""
        ...


def score_tokens(
    score: Callable[[Sequence[Sequence[int]], Sequence[Asked]], list[Found]],
    tokens: Iterable[np.ndarray],
    asked: Iterable[Asked],
) -> Iterator[Found]:
    """Yield what a policy finds in each sequence of tokens, by what is asked of each.

    The tokens are taken, and asked for, SCORED_AT_ONCE sequences at a time.
    """
    rows = zip(tokens, asked, strict=True)
    while part := [*islice(rows, SCORED_AT_ONCE)]:
        read, of_each = zip(*part, strict=True)
        yield from score([one.tolist() for one in read], of_each)


def score_trained(
    policy: Reference, tokens: Iterable[np.ndarray], masks: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Return a policy's log-probabilities of the trained tokens, 0 at the others.

    They are aligned with the masks. What the policy reads ends with the tokens of the masks, and
    may begin with more. Sequences without a trained token are not asked for.
    """
    read = (own for own, mask in zip(tokens, masks, strict=True) if mask.any())
    last = count_from_first([mask for mask in masks if mask.any()])
    scored = score_tokens(policy.score, read, last)
    found = [np.zeros(len(mask), np.float32) for mask in masks]
    for aligned, mask in zip(found, masks, strict=True):
        if mask.any():
            values = next(scored)
            own = mask[-len(values) :] != 0
            aligned[-len(values) :][own] = values[own]
    return found


def count_from_first(masks: Sequence[np.ndarray]) -> list[int]:
    """Count the tokens of each sequence from its first trained one on."""
    return [len(mask) - int((mask != 0).argmax()) for mask in masks]
