"""hello, trained on SkyRL's own server: whole, and killed and resumed, beside the engine.

What `ratchet doctor` finds of both is printed too.

python -m benchmarks.servers.hello_on_skyrl --steps 10 --kills 5
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from benchmarks.interruptions import compare_runs, killable_runs
from benchmarks.measuring import describe_machine, format_table
from benchmarks.servers.skyrl_server import KEY, skyrl_server, version_of
from ratchet.tasks.recording.step_log import read_metrics
from ratchet.tasks.storage.run_folder import RunFolder

AFTER_SECONDS = 2.0
"""Longest time from a write to a kill."""
REWARD = "reward/mean"
FOLDER = Path("runs/servers")


@dataclass(frozen=True)
class Kill:
    """A kill: how many steps were done, and what the run was doing."""

    step: int
    stage: str


def train_killed(
    run: RunFolder, size: int, kills: int, settings: Sequence[str], environment: dict[str, str]
) -> list[Kill]:
    """Train a run that is killed at moments spread over `size` bytes, and started after each."""
    random, noted = Random(0), []
    for number in range(kills):
        training = killable_runs.train(run, settings, environment)
        target = size * (number + random.uniform(0.2, 0.8)) / kills
        delay = random.uniform(0, AFTER_SECONDS)
        if not training.writes(target - training.size) or training.ends_within(delay):
            raise SystemExit(f"{run.path} ended before kill {number + 1} of {kills}")
        training.kill("flow")
        training.process.wait()
        noted.append(Kill(len(read_metrics(run.metrics)), compare_runs.stage_of(run)))
    killable_runs.train_to_end(run, settings, environment)
    return noted


def examine(environment: dict[str, str]) -> str:
    """Return what `ratchet doctor` says of a service, and of hello there."""
    command = [Path(sys.executable).with_name("ratchet"), "doctor", "hello"]
    said = subprocess.run(command, env=environment, capture_output=True, text=True)
    return f"{said.stdout}{said.stderr}"


def rewards(run: RunFolder) -> list[float]:
    return [row[REWARD] for row in read_metrics(run.metrics)]


def equal_steps(one: RunFolder, other: RunFolder) -> int:
    """Count the first steps whose datums, and so their tokens and scores, are equal bit by bit."""
    count = 0
    for mine, theirs in zip(_datums(one), _datums(other), strict=False):
        if mine != theirs:
            break
        count += 1
    return count


def _datums(run: RunFolder) -> list[str]:
    files = sorted(run.path.glob("datums/*.parquet"))
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


def timed(
    run: RunFolder, settings: Sequence[str], environment: dict[str, str], seconds: dict[str, float]
) -> RunFolder:
    begun = time.monotonic()
    killable_runs.train_to_end(run, settings, environment)
    seconds[run.name] = time.monotonic() - begun
    return run


def report(
    runs: Sequence[RunFolder], kills: Sequence[Kill], seconds: dict[str, float], version: str
) -> None:
    """Print the curves, the kills, and how far the runs are equal."""
    engine, whole, killed = runs
    print(describe_machine())
    rows = [
        [str(step), *(f"{reward:.3f}" for reward in of_step)]
        for step, of_step in enumerate(zip(*map(rewards, runs), strict=True))
    ]
    title = f"Mean reward of hello by SkyRL {version} (JAX, CPU), beside the engine"
    print(format_table(title, ["step", "engine", "SkyRL", "SkyRL, killed and resumed"], rows))
    for kill in kills:
        print(f"killed with {kill.step} steps done, during: {kill.stage}")
    print(f"seconds in all: {json.dumps({name: round(s) for name, s in seconds.items()})}")
    steps = len(rows)
    equal = equal_steps(whole, killed)
    print(f"The killed run's datums equal those of the whole one in the first {equal} of {steps}.")
    print(f"Those of SkyRL equal the engine's in the first {equal_steps(engine, whole)}.")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=10)
    options.add_argument("--kills", type=int, default=5)
    options.add_argument("--set", action="append", default=[], dest="settings")
    options.add_argument("--folder", type=Path, default=FOLDER)
    given = options.parse_args()
    version, folder = version_of(), given.folder.absolute()
    if given.folder == FOLDER:
        shutil.rmtree(folder, ignore_errors=True)  # an earlier version may have trained there
    elif folder.exists():
        options.error(f"{folder} exists; name a new folder")
    settings = [f"steps={given.steps}", "evaluation.every=0", *given.settings]
    seconds: dict[str, float] = {}
    with killable_runs.prefect_server(folder / "prefect") as api:
        alone = killable_runs.environment(folder / "prefect", api)
        print(examine(alone))
        engine = timed(RunFolder(folder / "engine"), settings, alone, seconds)
        with skyrl_server(folder / "skyrl") as server:
            there = {**alone, "TINKER_BASE_URL": server.url, "TINKER_API_KEY": KEY}
            whole = timed(RunFolder(folder / "skyrl-whole"), settings, there, seconds)
            killed, size = RunFolder(folder / "skyrl-killed"), killable_runs.size_of(whole)
            begun = time.monotonic()
            kills = train_killed(killed, size, given.kills, settings, there)
            seconds[killed.name] = time.monotonic() - begun
            print(examine(there))
    report([engine, whole, killed], kills, seconds, version)


if __name__ == "__main__":
    main()
