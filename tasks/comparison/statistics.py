"""Means over examples and the difference of two means, with their uncertainty.

Each example counts once: its rewards are averaged first, since its rollouts are not independent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, fsum, hypot, nextafter, sqrt
from statistics import NormalDist, fmean, stdev

from ratchet.adapters.errors import counted

Z95 = NormalDist().inv_cdf(0.975)
"""1.96: the standard errors on either side of a mean that make its 95 % interval."""
CERTAIN = 0.05
"""Largest p-value of a difference that is not put down to chance."""

Interval = tuple[float, float]
Measured = tuple[float | None, Interval | None]


def pass_at(k: int, rollouts: int, passed: int) -> float:
    """Estimate pass@k without bias: 1 - C(n - c, k) / C(n, k), for k <= n (Chen et al. 2021)."""
    if not 1 <= k <= rollouts:
        raise ValueError(f"pass@{k} needs k of 1 to {rollouts}, the number of rollouts")
    return (comb(rollouts, k) - comb(rollouts - passed, k)) / comb(rollouts, k)


def interval_of(means: Sequence[float]) -> Interval | None:
    """Return the 95 % interval of the mean of examples; None if there are too few.

    If every example is 0 or 1, it is Wilson's score interval (1927), which also holds for few
    examples and for means of 0 and 1. Otherwise it is that of means between 0 and 1 (`_interval`).
    """
    count = len(means)
    if count and set(means) <= {0.0, 1.0}:
        won, spread = fmean(means), Z95**2 / count
        centre = (won + spread / 2) / (1 + spread)
        half = sqrt(won * (1 - won) * spread + spread**2 / 4) / (1 + spread)
        return centre - half, centre + half
    return _interval(means, 0.0)


@dataclass(frozen=True)
class Gain:
    """Change of a measure of held-out examples, in an interval that holds it with 95 % confidence.

    It is of the paired `examples` of which both values are known. Without any the interval treats
    the two measures as independent, and is too wide. The value of a loss is negative if it fell.
    """

    value: float
    interval: Interval
    examples: int = 0
    of_loss: bool = False

    @property
    def amount(self) -> str:
        """The change in words, without its interval: `+0.38`, or `0.66 lower` of a loss."""
        if self.of_loss:
            return f"{abs(self.value):.2f} {'lower' if self.value < 0 else 'higher'}"
        return f"{self.value:+.2f}"

    @property
    def confidence(self) -> str:
        """The interval in words; that of a lower loss says by how much it is lower."""
        lower, upper = self.interval
        if self.of_loss and self.value < 0:
            lower, upper = -upper, -lower
        sign = "" if self.of_loss else "+"
        of = counted(self.examples, "example") if self.examples else "as if of other examples"
        return f"({lower:{sign}.2f} to {upper:{sign}.2f} with 95 % confidence, {of})"

    def __str__(self) -> str:
        return f"{self.amount} {self.confidence}"


def find_gain(
    before: Sequence[float], after: Sequence[float], weights: Sequence[float]
) -> Gain | None:
    """Find the gain of Σ values / Σ weights over the same examples; None if they are too few."""
    differences = [last - first for first, last in zip(before, after, strict=True)]
    if not differences or (interval := interval_of_ratio(differences, weights)) is None:
        return None
    return Gain(fsum(differences) / fsum(weights), interval, len(differences))


def find_unpaired_gain(before: Measured, after: Measured) -> Gain | None:
    """Find the gain of two values, each with its interval; None if one is not known.

    Its own interval recovers the variances of theirs (Zou and Donner 2008).
    """
    (first, own), (last, other) = before, after
    if first is None or last is None or own is None or other is None:
        return None
    down, up = hypot(own[1] - first, last - other[0]), hypot(first - own[0], other[1] - last)
    return Gain(last - first, (last - first - down, last - first + up))


def interval_of_mean(differences: Sequence[float]) -> Interval | None:
    """Return the 95 % interval of the mean of paired differences; None if there are too few.

    If every difference is -1, 0 or 1, it is the score interval of paired proportions (Tango 1998),
    which also holds for few examples and is no point where all are tied. Otherwise it is that of
    differences between -1 and 1 (`_interval`).
    """
    count = len(differences)
    if count and {*differences} <= {-1.0, 0.0, 1.0}:
        won, lost = (differences.count(sign) for sign in (1, -1))
        return _tango(won, lost, count, Z95), _tango(won, lost, count, -Z95)
    return _interval(differences, -1.0)


def _interval(values: Sequence[float], least: float) -> Interval | None:
    """Return the 95 % interval of a mean, from three values on: Student's (Miller 2024).

    Equal values have no deviation. Of as many, each has that value by a chance of 5 % if a share of
    1 - 0.05^(1/n) of all has another one, which is between `least` and 1, or on the value's side.
    """
    if (count := len(values)) < 3:
        return None
    mean = fmean(values)
    if max(values) - min(values) <= 1e-9 * max(map(abs, values)):  # but for rounding
        unseen = 1 - CERTAIN ** (1 / count)
        return mean + unseen * (min(least, mean) - mean), mean + unseen * (max(1.0, mean) - mean)
    half = student95(count - 1) * stdev(values) / sqrt(count)
    return mean - half, mean + half


def interval_of_ratio(differences: Sequence[float], weights: Sequence[float]) -> Interval | None:
    """Return the 95 % interval of Σ differences / Σ weights of paired examples; None if too few.

    An example's weight is its part of both measures: a text weighs its tokens. Unequal weights vary
    with the examples too, so the interval is that of the ratio's residuals (Cochran 1977, 6.4).
    """
    if len({*weights}) == 1:
        return interval_of_mean([one / weights[0] for one in differences])
    gain, mean = fsum(differences) / fsum(weights), fmean(weights)
    return interval_of_mean(
        [gain + (one - gain * own) / mean for one, own in zip(differences, weights, strict=True)]
    )


def student95(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t, within 1 % from 2 degrees of freedom on.

    It is the expansion of Cornish and Fisher (Abramowitz and Stegun 1964, 26.7.5).
    """
    z = Z95
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))


def _tango(won: int, lost: int, count: int, z: float) -> float:
    """Return the difference of proportions whose score is `z`, by bisection: the score falls."""
    low, high = -1.0, 1.0
    while nextafter(low, high) < high - 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if _score(won, lost, count, middle) > z else (low, middle)
    return high


def _score(won: int, lost: int, count: int, difference: float) -> float:
    """Return the score of a difference of paired proportions, by Tango's formula."""
    linear = (2 * count - won + lost) * difference - won - lost
    constant = -lost * difference * (1 - difference)
    losing = (sqrt(linear**2 - 8 * count * constant) - linear) / (4 * count)
    variance = count * (2 * losing + difference * (1 - difference))
    return (won - lost - count * difference) / sqrt(max(variance, 1e-12))
