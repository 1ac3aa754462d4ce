"""results of a sweep over seeds → its arms, each with its mean and its difference from the first.

An example's values are averaged over seeds first. The spread of three seeds or more is added to
that of examples, so that an interval holds for other seeds too.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import fsum, hypot, sqrt
from statistics import fmean, stdev

from ratchet.tasks.comparison.statistics import (
    Interval,
    find_unpaired_gain,
    interval_of,
    interval_of_ratio,
    student95,
)
from ratchet.tasks.storage.plan_record import Arm, ChildResult, Examples

BySeed = Mapping[int, tuple[float, Examples]]
"""Seed of a run of an arm → what it has measured, and its examples."""


def find_arms(
    results: Sequence[ChildResult], examples: Mapping[str, Examples], *, lowest: bool = False
) -> list[Arm]:
    """Find the arms of results, and choose the one of the best mean, of equals the first.

    An arm with a failed run is chosen only if every arm has one: what is left may be lucky. The
    `examples` are by the run's name; the best mean is the `lowest` of a loss.
    """
    runs, ended = defaultdict[str, list[str]](list), defaultdict[str, BySeed](dict)
    for one in results:
        runs[one.arm].append(one.run)
        if one.measured is not None:
            found = one.measured, examples.get(one.run, {})
            ended[one.arm] = {**ended[one.arm], one.seed or 0: found}
    arms = list[Arm]()
    for name, names in runs.items():
        arm = _measure(Arm(name, names, len(ended[name])), ended[name])
        arms.append(_compare(arm, ended[name], arms[0], ended[arms[0].name]) if arms else arm)
    known = [arm for arm in arms if arm.mean is not None]
    whole = [arm for arm in known if arm.seeds == len(arm.runs)] or known
    best = (min if lowest else max)(whole, key=lambda arm: arm.mean or 0.0, default=None)
    return [replace(arm, chosen=arm is best) for arm in arms]


def _measure(arm: Arm, own: BySeed) -> Arm:
    """Return an arm with its mean; it has no interval where no examples are kept."""
    measured = [value for value, _ in own.values()]
    values, weights = _pool(examples for _, examples in own.values())
    if not values:
        return replace(arm, mean=fmean(measured)) if measured else arm
    interval = interval_of(values) if {*weights} == {1.0} else interval_of_ratio(values, weights)
    mean, centre = fmean(measured), fsum(values) / fsum(weights)
    return replace(arm, mean=mean, interval=_with_seeds(mean, centre, interval, measured))


def _compare(arm: Arm, own: BySeed, first: Arm, others: BySeed) -> Arm:
    """Return an arm with its difference from the first, by seed and example if both have them."""
    pairs = [(own[seed], others[seed]) for seed in sorted(own.keys() & others.keys())]
    values, weights = _pool(_subtract(one[1], other[1]) for one, other in pairs)
    if values:
        mean, apart = fsum(values) / fsum(weights), [one[0] - other[0] for one, other in pairs]
        within = _with_seeds(mean, mean, interval_of_ratio(values, weights), apart)
        return replace(arm, difference=mean, within=within, paired=True)
    gain = find_unpaired_gain((first.mean, first.interval), (arm.mean, arm.interval))
    return arm if gain is None else replace(arm, difference=gain.value, within=gain.interval)


def _subtract(own: Examples, others: Examples) -> Examples:
    """Return what the examples of both differ by; none if their weights differ."""
    both = sorted(own.keys() & others.keys())
    if any(own[key][1] != others[key][1] for key in both):
        return {}
    return {key: (own[key][0] - others[key][0], own[key][1]) for key in both}


def _pool(runs: Iterable[Examples]) -> tuple[list[float], list[float]]:
    """Return the mean value and the mean weight of each example over the runs."""
    parts = defaultdict[str, list[tuple[float, float]]](list)
    for examples in runs:
        for key, part in examples.items():
            parts[key].append(part)
    means = [[fmean(of) for of in zip(*one, strict=True)] for one in parts.values()]
    return [value for value, _ in means], [weight for _, weight in means]


def _with_seeds(
    value: float, centre: float, interval: Interval | None, seeds: Sequence[float]
) -> Interval | None:
    """Return an interval of examples around another value, wider by the spread of the seeds."""
    if interval is None:
        return None
    count = len(seeds)
    half = student95(count - 1) * stdev(seeds) / sqrt(count) if count >= 3 else 0.0
    return value - hypot(centre - interval[0], half), value + hypot(interval[1] - centre, half)
