"""Training with steps that overlap beside the synchronous loop: the time, and what is learned.

Every run trains `benchmarks.agents.slow_guessing`, whose rollouts wait most of their time.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median

import pyarrow.parquet as pq

from benchmarks.interruptions import killable_runs
from benchmarks.measuring import describe_machine, format_table, paired_ratio
from benchmarks.pictures.learning import read_held_out
from ratchet.adapters.calls import POLICY
from ratchet.tasks.recording.step_log import read_metrics
from ratchet.tasks.storage.names import shard_name
from ratchet.tasks.storage.run_folder import RunFolder

LAST = 3
"""Steps over which the reward at the end is averaged."""


@dataclass(frozen=True)
class Overlap:
    """What the rows of the table differ in."""

    lag: int
    streamed: int = 0
    """Batches of a step that is streamed; 0 for one that is not, in four batches."""

    @property
    def settings(self) -> tuple[str, ...]:
        """Settings of a recipe."""
        if self.streamed:
            return ("rollouts.stream=true", f"rollouts.batches={self.streamed}")
        return (f"rollouts.lag={self.lag}", "rollouts.batches=4")

    def __str__(self) -> str:
        if self.streamed:
            return f"streamed, {self.streamed} batches"
        return "synchronous" if self.lag == 0 else f"lag {self.lag}"


@dataclass(frozen=True)
class Course:
    """Course of a run: at the end of each step, seconds, sampled tokens, and the step's reward."""

    seconds: list[float]
    """Seconds since the first training call; evaluations run beside the training."""
    tokens: list[float]
    rewards: list[float]
    ess: list[float]
    held_out: float


def read_course(run: RunFolder) -> Course:
    """Read the course of a finished run."""
    metrics = read_metrics(run.metrics)
    first = min(
        pq.read_table(path, columns=["started"])["started"].to_pylist()[0].timestamp()
        for path in run.sealed(shard_name("train", 0))
    )
    ends = [run.update(POLICY, step).stat().st_mtime for step in range(len(metrics))]
    return Course(
        [end - first for end in ends],
        [*accumulate(row["tokens/sampled"] for row in metrics)],
        [row["reward/mean"] for row in metrics],
        [row.get("ess", 1.0) for row in metrics],
        read_held_out(run, len(metrics)).mean or 0.0,
    )


def train(folder: Path, overlap: Overlap, seed: int, steps: int) -> Course:
    """Train a run, or read what it has left."""
    run = RunFolder(folder / f"lag-{overlap.lag}-streamed-{overlap.streamed}-{seed}")
    if len(read_metrics(run.metrics)) < steps:
        settings = (
            "agent=benchmarks.agents.slow_guessing:play",
            "dataset.path=datasets/guess_the_number.jsonl",
            'dataset.columns=["high","guesses","secret"]',
            "rollouts.groups=8",
            f"steps={steps}",
            f"seed={seed}",
            "evaluation.examples=64",
            "evaluation.greedy=false",
        )
        home = folder / "prefect"
        with killable_runs.prefect_server(home) as api:
            environment = killable_runs.environment(home, api)
            killable_runs.train_to_end(run, (*settings, *overlap.settings), environment)
    return read_course(run)


def row_of(overlap: Overlap, courses: Sequence[Course], beside: Sequence[Course]) -> list[str]:
    """Return a row: medians over the seeds, and the range of what varies most."""
    seconds = [course.seconds[-1] for course in courses]
    ratio = paired_ratio([course.seconds[-1] for course in beside], seconds)
    ends = [fmean(course.rewards[-LAST:]) for course in courses]
    held_out = [course.held_out for course in courses]
    return [
        str(overlap),
        f"{median(seconds):.0f} ({min(seconds):.0f}-{max(seconds):.0f})",
        f"{ratio:.2f}",
        f"{median(ends):.2f} ({min(ends):.2f}-{max(ends):.2f})",
        f"{median(held_out):.2f} ({min(held_out):.2f}-{max(held_out):.2f})",
        f"{median(course.tokens[-1] for course in courses):,.0f}",
        f"{median(min(course.ess) for course in courses):.3f}",
    ]


def main() -> None:
    """Train every row with every seed, and print the table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--lag", type=int, nargs="+", default=[0, 1, 2, 4])
    options.add_argument("--streamed", type=int, nargs="*", default=[])
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--steps", type=int, default=10)
    options.add_argument("--folder", type=Path, default=Path("runs/overlap"))
    arguments = options.parse_args()
    print(describe_machine(), flush=True)
    rows = [Overlap(lag) for lag in dict.fromkeys((0, *arguments.lag))]
    rows += [Overlap(0, batches) for batches in arguments.streamed]
    courses: dict[Overlap, list[Course]] = {row: [] for row in rows}
    for seed in range(arguments.seeds):
        for row in rows:
            courses[row].append(train(arguments.folder.absolute(), row, seed, arguments.steps))
    header = ("rollouts", "seconds", "speed-up", "reward, last steps", "held out", "tokens", "ess")
    table = [row_of(row, runs, courses[rows[0]]) for row, runs in courses.items()]
    title = f"{arguments.steps} steps of guess_the_number with slow calls, {arguments.seeds} seeds"
    print(format_table(title, header, table))


if __name__ == "__main__":
    main()
