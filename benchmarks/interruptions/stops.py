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
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random

from benchmarks.interruptions import compare_runs, killable_runs
from benchmarks.interruptions.workloads import WORKLOADS
from benchmarks.measuring import describe_machine, format_table
from ratchet.tasks.storage.run_folder import RunFolder

VICTIMS = {
    "flow": None,
    "engine": " -m ratchet.engine ",
    "Prefect's server": " -m ratchet.flows.server.embedded_program",
}
"""Process that is stopped → words of its command; it is a child of the flow's process."""

SETTINGS = WORKLOADS["hello"]


@dataclass(frozen=True)
class Stop:
    """A run, by its name, that is stopped once."""

    run: str
    victim: str
    seconds: float


@dataclass(frozen=True)
class Stopped:
    """What became of a run that was stopped."""

    stop: Stop
    stage: str
    faults: list[str]
    warnings: list[str]


def stop_once(
    folder: Path,
    environment: killable_runs.Environment,
    reference: RunFolder,
    stop: Stop,
) -> Stopped:
    """Train a run whose victim stands still once, at a random moment."""
    run, words = RunFolder(folder / stop.run), VICTIMS[stop.victim]
    size = killable_runs.size_of(reference) * Random(stop.run).uniform(0.1, 0.8)
    training = killable_runs.train(run, SETTINGS, environment)
    if not training.writes(size):
        raise SystemExit(f"{run.path} ended before it was stopped")
    victim = training.process.pid if words is None else training.children(words)[0]
    os.kill(victim, signal.SIGSTOP)
    stage = compare_runs.stage_of(run)
    time.sleep(stop.seconds)
    os.kill(victim, signal.SIGCONT)
    code = training.exit_code()
    faults = [f"ended with code {code}"] if code else []
    if not faults:
        faults = compare_runs.list_faults(run, compare_runs.read_contents(reference))
    said = killable_runs.log_of(run).read_text(encoding="utf-8").splitlines()
    return Stopped(
        stop, stage, faults, [line for line in said if "WARNING" in line or "ERROR" in line]
    )


def report(stops: list[Stopped]) -> str:
    """Return a line for each run that was stopped, and what the runs have logged."""
    rows = [
        (
            f"{one.stop.victim}, {one.stop.seconds:g} s",
            one.stage,
            ", ".join(one.faults) or "none",
            str(len(one.warnings)),
        )
        for one in stops
    ]
    said = "\n".join(f"{one.stop.run}: {line}" for one in stops for line in one.warnings)
    return f"{format_table('Stops', ('stopped', 'during', 'faults', 'warnings'), rows)}\n{said}"


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
    reference = RunFolder(folder / "reference")
    killable_runs.train_to_end(reference, SETTINGS, environment)
    chosen = [
        Stop(f"{victim.split()[-1]}-{seconds:g}-{number}", victim, seconds)
        for victim, seconds in product(arguments.victims, arguments.seconds)
        for number in range(arguments.each)
    ]
    with ThreadPoolExecutor(arguments.parallel) as threads:
        stops = [threads.submit(stop_once, folder, environment, reference, stop) for stop in chosen]
        stopped = [stop.result() for stop in stops]
    print(report(stopped))
    raise SystemExit(
        "\n".join(f"{one.stop.run} {fault}" for one in stopped for fault in one.faults) or 0
    )


if __name__ == "__main__":
    main()
