"""Ranges of what is estimated, and how they follow from a few draws."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from math import sqrt
from operator import add
from statistics import fmean, stdev
from typing import Self

Z90 = 1.645
"""Normal deviate of a two-sided interval of 90 %."""
T90 = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83, 1.81)
"""Student's deviates of a two-sided interval of 90 %, from one degree of freedom on."""


@dataclass(frozen=True)
class Range:
    """A value that is expected, and the ends of its interval of 90 %."""

    low: float
    expected: float
    high: float

    @classmethod
    def exact(cls, value: float) -> Self:
        return cls(value, value, value)

    def __add__(self, other: "Range") -> "Range":
        """Add a range that may err the same way: the ends are added."""
        return Range(self.low + other.low, self.expected + other.expected, self.high + other.high)

    def __mul__(self, factor: "float | Range") -> "Range":
        by = factor if isinstance(factor, Range) else Range.exact(factor)
        return Range(self.low * by.low, self.expected * by.expected, self.high * by.high)

    def at_most(self, limit: float) -> "Range":
        return Range(*(min(end, limit) for end in (self.low, self.expected, self.high)))

    def holds(self, value: float) -> bool:
        """Return whether a value lies in the interval; its ends are rounded outwards."""
        return int(self.low) <= value <= self.high + 1


ZERO_RANGE = Range.exact(0)
ONE = Range.exact(1)


def sum_of(ranges: Iterable[Range]) -> Range:
    return reduce(add, ranges, ZERO_RANGE)


def sum_of_draws(seen: Sequence[float], draws: float) -> Range:
    """Return the range of a sum of so many draws, of which some were `seen`.

    It has the error of the mean that was seen and that of the sum itself, by Student's deviates.
    One draw alone says nothing of the spread, which is then as large as the draw.
    """
    if not seen or not draws:
        return ZERO_RANGE
    mean, count = fmean(seen), len(seen)
    spread = stdev(seen) if count > 1 else mean
    deviate = T90[count - 2] if 1 < count < len(T90) + 2 else Z90
    half = deviate * spread * sqrt(1 / count + 1 / draws) * draws
    return Range(max(0.0, mean * draws - half), mean * draws, mean * draws + half)


def share_of_draws(seen: Sequence[float]) -> Range:
    """Return the range of a share, of which one was `seen` in each draw, by Wilson's interval."""
    count, share = len(seen), fmean(seen)
    z = Z90**2 / count
    centre = (share + z / 2) / (1 + z)
    half = Z90 / (1 + z) * sqrt(max(0.0, share * (1 - share)) / count + z / (4 * count))
    low, high = max(0.0, centre - half), min(1.0, centre + half)
    return Range(low, min(max(share, low), high) if 0 < share < 1 else (share + centre) / 2, high)
