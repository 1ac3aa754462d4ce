"""Sums and differences of two small numbers, which no document of the corpora contains."""

from collections.abc import Iterator
from itertools import combinations_with_replacement
from random import Random

HIGH = 12
SHOWN = {(2, 3), (1, 9)}
"""Pairs of numbers of the answered examples that the agent shows; no split has them."""
SPLITS = {"train": 46, "validation": 15, "test": 15}
"""Pairs of numbers of each split; what is asked of a pair is all in one split."""


def examples() -> list[dict[str, str | int]]:
    """Return the rows of datasets/sums.jsonl; no question appears twice."""
    all_pairs = combinations_with_replacement(range(1, HIGH + 1), 2)
    pairs = [pair for pair in all_pairs if pair not in SHOWN]
    Random("sums").shuffle(pairs)
    splits = [split for split, size in SPLITS.items() for _ in range(size)]
    return [
        {"question": f"What is {text}?", "answer": answer, "split": split}
        for (low, high), split in zip(pairs, splits, strict=True)
        for text, answer in _asked_of(low, high)
    ]


def _asked_of(low: int, high: int) -> Iterator[tuple[str, int]]:
    yield f"{high} + {low}", high + low
    if low < high:
        yield f"{low} + {high}", low + high
    yield f"{high} - {low}", high - low
