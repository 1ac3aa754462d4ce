"""Timelines of finished runs: where their seconds went."""

import json
from dataclasses import dataclass
from itertools import pairwise
from math import nan
from pathlib import Path
from statistics import median

import pyarrow.parquet as pq

from ratchet.tasks.recording.spans import LLM, REWARD
from ratchet.tasks.recording.step_log import read_metrics
from ratchet.tasks.storage.names import shard_name
from ratchet.tasks.storage.run_folder import RunFolder


@dataclass(frozen=True)
class Timeline:
    """Seconds of a run, and of each step but the last, since a step ends at the next first call.

    `rollouts` last from the first call to the last rollout's end, `training` from the datums until
    the new weights are saved; `between` is the rest of the step.
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
        """Seconds of each step that are neither rollouts nor training."""
        parts = zip(self.steps, self.rollouts, self.training, strict=True)
        return [step - rollouts - training for step, rollouts, training in parts]


def read_run_timeline(run: RunFolder, started: float, whole: float) -> Timeline:
    """Read the timeline of a run, whose process started at `started` (Unix time)."""
    metrics = read_metrics(run.metrics)
    begun = [_first_call(run, shard_name("train", step)) for step in range(len(metrics))]
    return Timeline(
        startup=_first_call(run, shard_name("test", 0)) - started,
        whole=whole,
        steps=[after - before for before, after in pairwise(begun)],
        rollouts=[row["seconds/sampling"] for row in metrics[:-1]],
        training=[row["seconds/training"] for row in metrics[:-1]],
        rewards=[row["reward/mean"] for row in metrics],
    )


def read_bare_timeline(report: Path, started: float, whole: float) -> Timeline:
    """Read the timeline of a bare loop from the report that `bare_loop.py` wrote."""
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


PAUSES = "pauses.jsonl"
"""File that processes with the probe of `pause_probe/` write into the folder of a round."""
PROCESSES = {
    "ratchet.flows.cli.main": "flow",
    "engine-of-ratchet": "engine",
    "ratchet.flows.server.embedded_program": "Prefect's server",
}
"""Part of a process's command → what it is called."""


@dataclass(frozen=True)
class Pause:
    """A pause of a process's interpreter: its seconds, those of the collector, and the memory."""

    seconds: float
    collecting: float
    memory: int


def read_pauses(file: Path, since: float) -> dict[str, list[Pause]]:
    """Read the pauses of each process after a moment (Unix time), as the processes are called."""
    pauses: dict[str, list[Pause]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        _, command, at, seconds, collecting, memory = json.loads(line)
        name = next((name for part, name in PROCESSES.items() if part in command), None)
        if name is not None and at - seconds > since:
            pauses.setdefault(name, []).append(Pause(seconds, collecting, memory))
    return pauses


def begin_of_step(run: RunFolder, step: int) -> float:
    """Return when the first call of a step was sampled, as Unix time."""
    return _first_call(run, shard_name("train", step))


def rollout_times(run: RunFolder) -> tuple[float, float, float]:
    """Return the median seconds of a training rollout before, in and after its one call.

    All rollouts of a step are under way together, so these are times waited, not times worked.
    """
    before, in_call, after = [], [], []
    for spans in sorted((run.path / "spans").glob("train-*.parquet")):
        columns = ["rollout_id", "kind", "started", "ended"]
        rows = pq.read_table(spans, columns=columns).to_pylist()
        calls = {row["rollout_id"]: row for row in rows if row["kind"] == LLM}
        for rollout in (row for row in rows if row["kind"] == REWARD):
            call = calls[rollout["rollout_id"]]
            before.append((call["started"] - rollout["started"]).total_seconds())
            in_call.append((call["ended"] - call["started"]).total_seconds())
            after.append((rollout["ended"] - call["ended"]).total_seconds())
    return median(before), median(in_call), median(after)


def _first_call(run: RunFolder, shard: str) -> float:
    tables = (pq.read_table(path, columns=["kind", "started"]) for path in run.sealed(shard))
    rows = (row for table in tables for row in table.to_pylist())
    return min(row["started"] for row in rows if row["kind"] == LLM).timestamp()
