"""Timelines of finished runs: the seconds of each part of a step."""

import json
from dataclasses import dataclass
from itertools import pairwise
from math import nan
from pathlib import Path
from statistics import median

import pyarrow.parquet as pq

from tasks.metrics import read_metrics


@dataclass(frozen=True)
class Timeline:
    """Seconds of a run's parts: once per run, and for each step but the last.

    `rollouts` is from the first call to the last rollout's end, `training` from the datums until
    the new weights are saved, and `between` the rest of the step. The last step has no end, because
    the next step's first call ends a step.
    """

    startup: float
    whole: float
    steps: list[float]
    rollouts: list[float]
    training: list[float]
    rewards: list[float]
    cpu: float = nan

    @property
    def between(self) -> list[float]:
        parts = zip(self.steps, self.rollouts, self.training, strict=True)
        return [step - rollouts - training for step, rollouts, training in parts]


def of_ratchet(run: Path, started: float, whole: float) -> Timeline:
    """Read the timeline from a run's folder; `started` is the process's start (Unix time)."""
    metrics = read_metrics(run / "metrics.jsonl")
    begun = [_first_call(run / f"spans/train-{step:05d}.parquet") for step in range(len(metrics))]
    return Timeline(
        startup=_first_call(run / "spans/test-00000.parquet") - started,
        whole=whole,
        steps=[after - before for before, after in pairwise(begun)],
        rollouts=[row["seconds/sampling"] for row in metrics[:-1]],
        training=[row["seconds/training"] for row in metrics[:-1]],
        rewards=[row["reward/mean"] for row in metrics],
    )


def of_bare_loop(report: Path, started: float, whole: float) -> Timeline:
    """Read the timeline from the report of `bare_loop.py`."""
    steps = json.loads(report.read_text(encoding="utf-8"))
    pairs = list(pairwise(steps))
    return Timeline(
        startup=steps[0]["sampling"] - started,
        whole=whole,
        steps=[after["sampling"] - step["sampling"] for step, after in pairs],
        rollouts=[step["training"] - step["sampling"] for step, _ in pairs],
        training=[after["saved"] - step["training"] for step, after in pairs],
        rewards=[step["reward"] for step in steps],
    )


def ways(run: Path) -> tuple[float, float, float]:
    """Return a rollout's median seconds before its call, in its call, and after its call.

    All rollouts of a step run concurrently, so these seconds are mostly waiting.
    """
    there, at_the_door, back = [], [], []
    for spans in sorted((run / "spans").glob("train-*.parquet")):
        columns = ["rollout_id", "kind", "started", "ended"]
        rows = pq.read_table(spans, columns=columns).to_pylist()
        calls = {row["rollout_id"]: row for row in rows if row["kind"] == "llm"}
        for rollout in (row for row in rows if row["kind"] == "reward"):
            call = calls[rollout["rollout_id"]]
            there.append((call["started"] - rollout["started"]).total_seconds())
            at_the_door.append((call["ended"] - call["started"]).total_seconds())
            back.append((rollout["ended"] - call["ended"]).total_seconds())
    return median(there), median(at_the_door), median(back)


def _first_call(spans: Path) -> float:
    rows = pq.read_table(spans, columns=["kind", "started"]).to_pylist()
    return min(row["started"] for row in rows if row["kind"] == "llm").timestamp()
