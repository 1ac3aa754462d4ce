"""The log of a run's steps, metrics.jsonl: one flat row of numbers for each finished step."""

from collections.abc import Mapping, Sequence
from math import fsum
from pathlib import Path

from tasks.storage.files import append_row, read_log

Metrics = dict[str, float]

COST = "cost/"
"""Prefix of a role's name: what its calls cost, in US dollars."""


def record_metrics(path: Path, step: int, metrics: Mapping[str, float]) -> None:
    """Append a step's line to metrics.jsonl, which ends the step; a step has one line only."""
    if all(row["step"] != step for row in read_metrics(path)):
        append_row(path, {"step": step, **metrics})


def read_metrics(path: Path) -> list[Metrics]:
    """Read the lines of metrics.jsonl, in order; an empty list if there is no such file."""
    return read_log(path)


def spent_seconds(rows: Sequence[Mapping[str, float]]) -> float:
    """Sum the seconds of sampling and of training, without start-up and evaluation.

    Every policy has its training. With a lag the two overlap, and the sum is no duration.
    """
    endings = ("seconds/sampling", "seconds/training")
    return fsum(row[name] for row in rows for name in row if name.endswith(endings))
