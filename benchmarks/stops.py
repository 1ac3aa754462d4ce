"""Stops a process of a training run for a while (SIGSTOP), and compares the run with a reference.

The victims are the flow's process (in which the door is a server), the engine, and Prefect's
embedded server. Each run is stopped once, at a random moment; it goes on by itself, and nothing is
started again. The exit status is 1 if a run ends with an error, or differs from a run that was not
stopped, or plays or samples anything twice.
"""

import argparse
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from random import Random

from benchmarks import compare_runs, killable_runs, kills
from benchmarks.measuring import describe_machine, format_table
from tasks.storage.run_folder import RunFolder

VICTIMS = {"flow": None, "engine": " -m engine ", "Prefect's server": " -m uvicorn "}
"""Process that is stopped → words of its command; it is a child of the flow's process."""

SETTINGS = kills.WORKLOADS["hello"]
FORBIDDEN = ("finished_rerun", "applied_twice", "sampled_twice")


@dataclass(frozen=True)
class Stop:
    """A run that is stopped once."""

    victim: str
    seconds: float
    number: int = 0

    @property
    def run(self) -> str:
        """Name of the run."""
        return f"{self.victim.split()[-1]}-{self.seconds:g}-{self.number}"


@dataclass(frozen=True)
class Stopped:
    """What became of a run that was stopped."""

    stop: Stop
    stage: str
    code: int
    differing: list[str]
    counts: compare_runs.Counts
    warnings: list[str]

    def faults(self) -> list[str]:
        """List what is wrong with the run."""
        counts = asdict(self.counts)
        repeated = [f"{name} = {counts[name]}" for name in FORBIDDEN if counts[name]]
        ended = [f"ended with code {self.code}"] if self.code else []
        differing = [f"differs in {part}" for part in self.differing]
        return [f"{self.stop.run} {fault}" for fault in (*ended, *differing, *repeated)]


def make_reference(folder: Path, environment: killable_runs.Environment) -> RunFolder:
    """Train the run without a stop, unless it is there."""
    run = RunFolder(folder / "reference")
    if killable_runs.train(run, SETTINGS, environment).exit_code():
        raise SystemExit(f"the reference run failed; see {killable_runs.log_of(run)}")
    return run


def stop_once(
    folder: Path, environment: killable_runs.Environment, reference: RunFolder, stop: Stop
) -> Stopped:
    """Train a run whose victim stands still once, at a random moment."""
    run, words = RunFolder(folder / stop.run), VICTIMS[stop.victim]
    size = killable_runs.size_of(reference) * Random(stop.run).uniform(0.1, 0.8)
    training = killable_runs.train(run, SETTINGS, environment)
    stage = "ended before"
    if training.writes(size):
        flow = training.process.pid
        victim = flow if words is None else training.children(words)[0]
        os.kill(victim, signal.SIGSTOP)
        stage = compare_runs.stage_of(run)
        time.sleep(stop.seconds)
        os.kill(victim, signal.SIGCONT)
    code = training.exit_code()
    said = killable_runs.log_of(run).read_text(encoding="utf-8").splitlines()
    return Stopped(
        stop,
        stage,
        code,
        compare_runs.differing_parts(
            compare_runs.read_contents(run), compare_runs.read_contents(reference)
        ),
        compare_runs.count_repetitions(run),
        [line for line in said if "WARNING" in line or "ERROR" in line],
    )


def report(stops: list[Stopped]) -> str:
    """Return a line for each run that was stopped, and what the runs have logged."""
    rows = [
        (
            f"{one.stop.victim}, {one.stop.seconds:g} s",
            one.stage,
            str(one.code),
            ", ".join(one.differing) or "nothing",
            *(str(asdict(one.counts)[name]) for name in FORBIDDEN),
            str(len(one.warnings)),
        )
        for one in stops
    ]
    names = (name.replace("_", " ") for name in FORBIDDEN)
    header = ("stopped", "during", "exit status", "differs", *names, "warnings")
    said = "\n".join(f"{one.stop.run}: {line}" for one in stops for line in one.warnings)
    return f"{format_table('Stops', header, rows)}\n{said}"


def main() -> None:
    """Run the stops from the command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, nargs="+", default=[30, 130, 300])
    options.add_argument("--victims", nargs="+", default=[*VICTIMS], choices=[*VICTIMS])
    options.add_argument("--each", type=int, default=1, help="runs of each kind")
    options.add_argument("--parallel", type=int, default=1, help="runs at the same time")
    options.add_argument(
        "--folder", type=Path, default=Path("runs/stops"), help="where the runs are kept"
    )
    arguments = options.parse_args()
    folder = arguments.folder.absolute()
    print(describe_machine(), flush=True)
    environment = killable_runs.environment(folder / "prefect", api="")
    del environment["PREFECT_API_URL"]  # Prefect starts its embedded server
    reference = make_reference(folder, environment)
    chosen = product(arguments.victims, arguments.seconds, range(arguments.each))
    with ThreadPoolExecutor(arguments.parallel) as threads:
        stops = [
            threads.submit(stop_once, folder, environment, reference, Stop(*stop))
            for stop in chosen
        ]
        stopped = [stop.result() for stop in stops]
    print(report(stopped))
    raise SystemExit("\n".join(fault for one in stopped for fault in one.faults()) or 0)


if __name__ == "__main__":
    main()
