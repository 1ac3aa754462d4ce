"""Loops of training on a service that works in cycles of ten seconds, under a virtual clock.

python -m benchmarks.ticks.loops [--steps 40] [--seeds 3]

A rollout takes a log-normal time, 5 minutes in the median (`--median`) and 30 at most, and every
loop plays the same ones. A cycle carries the passes that have come by its beginning, up to
`--datums` rollouts, and one optimizer step. Ratchet's loop and, if it is installed (`make peers`),
the cookbook's three loops run unmodified. Time stands still while they compute.
"""

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measuring import format_table, paired_ratio
from benchmarks.peers.formulas import PEERS
from benchmarks.ticks.cycles import MEDIAN_SECONDS, Times
from benchmarks.ticks.our_loops import train

COOKBOOK = PEERS["cookbook"].python
PROGRAM = Path(__file__).with_name("cookbook_loops.py")
SYNCHRONOUS = "synchronous"

Loops = Mapping[str, Mapping[str, Any]]
"""Settings of loops, by their names."""


def our_loops(lags: Sequence[int]) -> Loops:
    """Return settings of rollouts; a loop without any is the synchronous one."""
    return {
        SYNCHRONOUS: {},
        "streamed": {"stream": True},
        **{f"shard, lag {lag}": {"lag": lag} for lag in lags},
        **{f"shard, lag {lag}, streamed": {"lag": lag, "stream": True} for lag in lags[:1]},
        **{f"arrival, lag {lag}": {"lag": lag, "order": "arrival"} for lag in lags},
    }


def their_loops(lags: Sequence[int]) -> Loops:
    """Return the parts of a plan that name one of the cookbook's loops."""
    return {
        "cookbook, synchronous": {"loop": "synchronous", "lag": 0},
        "cookbook, streamed": {"loop": "streamed", "lag": 0},
        **{f"cookbook, async, lag {lag}": {"loop": "async", "lag": lag} for lag in lags},
    }


@dataclass(frozen=True)
class Workload:
    """Size of a run: its steps, their groups and rollouts, and what a cycle carries of them."""

    steps: int
    groups: int
    group_size: int
    datums: int


@dataclass(frozen=True)
class Course:
    """Course of a run in virtual time: the share of busy cycles, its seconds, and its rollouts."""

    busy: float
    seconds: float
    steps: int
    played: int

    @property
    def step_seconds(self) -> float:
        return self.seconds / self.steps


def run_ours(work: Workload, settings: Mapping[str, Any], times: Times) -> Course:
    """Train by Ratchet's loop, one group a batch."""
    rollouts = {"groups": work.groups, "group_size": work.group_size, "batches": work.groups}
    recipe = {"steps": work.steps, "rollouts": {**rollouts, **settings}}
    with tempfile.TemporaryDirectory() as scratch:
        measured = train(Path(scratch) / "runs", recipe, work.datums, times)
    return Course(**measured, played=work.steps * work.groups * work.group_size)


def run_theirs(work: Workload, settings: Mapping[str, Any], times: Times) -> Course:
    """Train by a loop of the cookbook."""
    plan = json.dumps({**asdict(work), **settings, "times": asdict(times)})
    done = subprocess.run([COOKBOOK, PROGRAM, plan], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{PROGRAM.name} {plan} ended with {done.returncode}:\n{done.stderr}")
    return Course(**json.loads(done.stdout))


def row_of(
    name: str, courses: Sequence[Course], beside: Sequence[Course], work: Workload
) -> list[str]:
    """Return a row: medians over the seeds, and the range of the ratio to the synchronous loop."""
    own, synchronous = ([c.step_seconds for c in of] for of in (courses, beside))
    ratios = [a / b for a, b in zip(synchronous, own, strict=True)]
    trained = [c.steps * work.groups * work.group_size for c in courses]
    return [
        name,
        f"{100 * median(c.busy for c in courses):.0f}",
        f"{3600 / median(own):.2f}",
        f"{paired_ratio(synchronous, own):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
        f"{median(c.played / n for c, n in zip(courses, trained, strict=True)):.2f}",
    ]


def main() -> None:
    """Run every loop with every seed, and print the table."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--lag", type=int, nargs="+", default=[1, 2, 4])
    options.add_argument("--steps", type=int, default=40)
    options.add_argument("--groups", type=int, default=12, help="of a step")
    options.add_argument("--group-size", type=int, default=8)
    options.add_argument("--datums", type=int, default=1, help="rollouts that a cycle trains")
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--median", type=float, default=MEDIAN_SECONDS, help="of a rollout, s")
    given = options.parse_args()
    work = Workload(given.steps, given.groups, given.group_size, given.datums)
    times = [Times(seed, given.median) for seed in range(given.seeds)]
    courses: dict[str, list[Course]] = {}
    for name, settings in our_loops(given.lag).items():
        courses[name] = [run_ours(work, settings, one) for one in times]
    for name, settings in their_loops(given.lag).items() if COOKBOOK.exists() else ():
        courses[name] = [run_theirs(work, settings, one) for one in times]
    header = ("loop", "busy cycles, %", "steps an hour", "speed-up", "played for one trained")
    rows = [row_of(name, runs, courses[SYNCHRONOUS], work) for name, runs in courses.items()]
    title = f"{work.steps} steps of {work.groups * work.group_size} rollouts, {given.seeds} seeds"
    print(format_table(title, header, rows))
    print(f"All runs took {time.process_time():.0f} s of this process's CPU time.")


if __name__ == "__main__":
    main()
