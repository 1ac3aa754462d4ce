"""Measures of a checkpoint on held-out units, with their intervals."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from ratchet.tasks.comparison.statistics import Gain, find_gain, find_unpaired_gain
from ratchet.tasks.storage.files import read_footer, read_json

COUNTS_KEY = "counts"
"""Key of a file's metadata: how many units each source has, and how many were lost."""


class HeldOutMeasure(BaseModel, frozen=True):
    """Measure of a checkpoint on held-out examples that it does not play; `beside` has others.

    The `value` lies in the `interval` with 95 % confidence; below two examples the interval and the
    `standard_error` are unknown. `tokens` counts the trained tokens of the examples. `by_example`
    has each example's part of the value and its weight, whose sums' ratio the value is.
    """

    measure: Literal["loss", "accuracy"]
    examples: int
    tokens: int
    value: float
    standard_error: float | None
    interval: tuple[float, float] | None
    beside: dict[str, float]
    by_example: tuple[tuple[float, float], ...] = ()


def read_measure(path: Path) -> HeldOutMeasure:
    return HeldOutMeasure.model_validate(read_json(path))


def find_measured_gain(first: HeldOutMeasure, last: HeldOutMeasure) -> Gain | None:
    """Find the change from one measure of a run's held-out examples to another; None if unknown."""
    before, after = ([*zip(*one.by_example, strict=True)] for one in (first, last))
    if before and after and before[1] == after[1]:
        gain = find_gain(before[0], after[0], before[1])
    else:
        gain = find_unpaired_gain(*((one.value, one.interval) for one in (first, last)))
    return None if gain is None else replace(gain, of_loss=first.measure == "loss")


def read_counts(units: Path) -> Mapping[str, Mapping[str, int]]:
    """Return for each source what was counted when its units became tokens."""
    return read_footer(units, COUNTS_KEY)


def describe_counts(counts: Mapping[str, int]) -> str:
    """Say the counts that are not 0."""
    return ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
