"""Sums and differences of two small numbers, which no document of the corpora contains."""

from collections.abc import Iterator
from itertools import combinations_with_replacement
from random import Random

HIGH = 20
SPLITS = {"train": 120, "validation": 45, "test": 45}
"""Pairs of numbers of each split; what is asked of a pair is all in one split."""


def examples() -> list[dict[str, str | int]]:
    """Return the rows of datasets/sums.jsonl; no question appears twice."""
    pairs = [*combinations_with_replacement(range(1, HIGH + 1), 2)]
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
