"""Measures of a checkpoint on held-out units, with their intervals."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Literal, Self

import numpy as np
from pydantic import BaseModel

from ratchet.tasks.comparison.statistics import Z95, Gain, find_gain, find_unpaired_gain
from ratchet.tasks.storage.files import read_json
from ratchet.tasks.storage.tables import read_table

COUNTS_KEY = b"counts"
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


def measure_loss(
    names: Sequence[tuple[str, int]], lost: "Sequence[SequenceLoss]", beside: Mapping[str, float]
) -> HeldOutMeasure:
    """Measure the loss over sequences, whose texts have names: a source and a number there.

    The standard error is for a ratio of two means over examples, since tokens of one text are not
    independent (Cochran 1977, 6.4).
    """
    sources: dict[str, dict[int, list[SequenceLoss]]] = defaultdict(lambda: defaultdict(list))
    for (source, number), one in zip(names, lost, strict=True):
        sources[source][number].append(one)
    of_source = {source: [*examples.values()] for source, examples in sources.items()}
    examples = [example for of_one in of_source.values() for example in of_one]
    loss, error = _estimate(examples)
    named = {source: _estimate(of_one)[0] for source, of_one in of_source.items() if source}
    return HeldOutMeasure(
        measure="loss",
        examples=len(examples),
        tokens=sum(one.tokens for one in lost),
        value=loss,
        standard_error=error,
        interval=None if error is None else (loss - Z95 * error, loss + Z95 * error),
        beside={**beside, **{f"loss/{source}": loss for source, loss in named.items()}},
        by_example=tuple(map(_sum, examples)),
    )


@dataclass(frozen=True)
class SequenceLoss:
    """Loss of a sequence over its trained tokens: its nats, also weighted, and the weights' sum."""

    nats: float
    weighted: float
    weight: float
    tokens: int

    @classmethod
    def of(cls, losses: np.ndarray, weights: np.ndarray) -> Self:
        own = weights[-len(losses) :].astype(np.float64)
        trained = own > 0
        lost = losses.astype(np.float64)[trained]
        weighted = float(own[trained] @ lost)
        return cls(float(lost.sum()), weighted, float(own.sum()), int(trained.sum()))


def _sum(example: Sequence[SequenceLoss]) -> tuple[float, float]:
    """Sum the weighted loss of an example's sequences, and the weights."""
    return sum(one.weighted for one in example), sum(one.weight for one in example)


def _estimate(examples: Sequence[Sequence[SequenceLoss]]) -> tuple[float, float | None]:
    sums, weights = np.array([_sum(own) for own in examples]).T
    loss, count = float(sums.sum() / weights.sum()), len(examples)
    if count < 2:
        return loss, None
    residuals = sums - loss * weights
    spread = count / (count - 1) * float(residuals @ residuals)
    return loss, sqrt(spread) / float(weights.sum())


def read_counts(units: Path) -> Mapping[str, Mapping[str, int]]:
    """Return for each source what was counted when its units became tokens."""
    return json.loads(read_table(units, []).schema.metadata[COUNTS_KEY])


def describe_counts(counts: Mapping[str, int]) -> str:
    """Say the counts that are not 0."""
    return ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
