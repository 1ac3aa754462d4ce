"""Wall time of a training run: `ratchet train hello` and a bare loop over the Tinker SDK.

Both train the same steps with the same prompts and seeds. They run in turn, each in its own process
and on a new engine.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is in this repository
os.environ.setdefault("TINKER_TELEMETRY", "0")

from benchmarks.measuring import machine, paired_ratio, table
from benchmarks.plans import planned
from benchmarks.timelines import Timeline, of_bare_loop, of_ratchet, ways
from flows.deployments import named_recipe
from flows.recipe import Recipe

ROOT = Path(__file__).parent.parent
RUN = "measured"
SETTINGS = ("evaluation.examples=1", "evaluation.greedy=false")
"""Settings with the least evaluation, because the bare loop has none."""

PARTS: Mapping[str, Callable[[Timeline], Sequence[float]]] = {
    "a step": lambda run: run.steps,
    "- rollouts": lambda run: run.rollouts,
    "- training, saving": lambda run: run.training,
    "- between them": lambda run: run.between,
    "start to first call": lambda run: [run.startup],
    "start to end": lambda run: [run.whole],
    "CPU, all processes": lambda run: [run.cpu],
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=3, help="runs of each")
    options.add_argument("--steps", type=int, default=8, help="of each run")
    asked = options.parse_args()
    settings = [f"steps={asked.steps}", *SETTINGS]
    recipe = named_recipe("hello", settings)
    print(machine())
    pairs: list[tuple[Timeline, Timeline]] = []
    with tempfile.TemporaryDirectory() as scratch:
        plan = Path(scratch) / "plan.json"
        plan.write_text(json.dumps(planned(recipe)), encoding="utf-8")
        for number in range(asked.rounds):
            folder = Path(scratch) / f"round-{number}"
            ours = on_its_engine(
                folder / "engine-of-ratchet", partial(ratchet_run, folder, settings)
            )
            bare = on_its_engine(
                folder / "engine-of-bare-loop", partial(bare_run, plan, folder / "bare.json")
            )
            pairs.append((ours, bare))
        print(report(pairs, recipe))
        print(waited(Path(scratch) / f"round-{asked.rounds - 1}" / RUN))


@contextmanager
def engine(state: Path) -> Iterator[dict[str, str]]:
    """Start a new engine and yield the environment variables of its clients."""
    command = [sys.executable, "-m", "engine", "--state", str(state), "--exit-with-stdin"]
    with subprocess.Popen(
        command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            exports = [process.stdout.readline().removeprefix("export ") for _ in range(2)]
            yield dict(line.strip().split("=", 1) for line in exports)
        finally:
            process.stdin.close()


def on_its_engine(state: Path, run: Callable[[dict[str, str]], Timeline]) -> Timeline:
    """Run on a new engine; return the result and the processor seconds of all its processes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with engine(state) as service:
        timeline = run(service)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return replace(timeline, cpu=cpu)


def ratchet_run(folder: Path, settings: Sequence[str], service: dict[str, str]) -> Timeline:
    """Run `ratchet train`; all rounds share Prefect's folder, so the database is made once."""
    where = {"RATCHET_RUNS": str(folder), "PREFECT_HOME": str(folder.parent / "prefect")}
    overrides = [part for setting in settings for part in ("--set", setting)]
    command = ["flows.cli", "train", "hello", "--run", RUN, *overrides]
    return of_ratchet(folder / RUN, *timed(command, {**service, **where}))


def bare_run(plan: Path, told: Path, service: dict[str, str]) -> Timeline:
    return of_bare_loop(told, *timed(["benchmarks.bare_loop", str(plan), str(told)], service))


def timed(command: Sequence[str], environment: dict[str, str]) -> tuple[float, float]:
    """Run a module to its end; return its start (Unix time) and its seconds."""
    started = time.time()
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return started, time.time() - started


def report(pairs: Sequence[tuple[Timeline, Timeline]], recipe: Recipe) -> str:
    """Format one table; a ratio is the median of the rounds' ratios."""
    rollouts = f"{recipe.rollouts.groups} x {recipe.rollouts.group_size}"
    same = all(ours.rewards == bare.rewards for ours, bare in pairs)
    rows = []
    for what, part in PARTS.items():
        ours, bare = ([median(part(run)) for run in runs] for runs in zip(*pairs, strict=True))
        rows.append([what, spread(ours), spread(bare), f"{paired_ratio(ours, bare):.2f}"])
    title = (
        f"hello, {recipe.steps} steps of {rollouts} rollouts, {len(pairs)} runs of each: seconds"
    )
    compared = "The same rewards at every step." if same else "The rewards DIFFER."
    return table(title, ("", "ratchet train", "bare loop", "ratio"), rows) + f"\n{compared}\n"


def spread(times: Sequence[float]) -> str:
    return f"{median(times):.2f} ({min(times):.2f}-{max(times):.2f})"


def waited(run: Path) -> str:
    names = ("to the door", "at the door: rendering, sampling", "journal, and back to the agent")
    rows = [[name, f"{seconds:.3f}"] for name, seconds in zip(names, ways(run), strict=True)]
    return table("A rollout's seconds in `ratchet train`, medians", ("", "s"), rows)


if __name__ == "__main__":
    main()
