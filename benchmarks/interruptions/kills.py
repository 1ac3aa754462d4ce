"""Kills training runs at random moments, continues them, and compares them with a reference run.

A trial is one run that is killed up to `--each` times: the flow's process (the door is a server in
it) by SIGKILL, SIGTERM or Ctrl-C, or with its engine, after which the run is started again; or the
engine or a process of its cluster alone, after which it goes on. At its end it is compared with an
uninterrupted run of the same recipe and lag with one rollout batch. Every kill and every trial is a
line of a file, so a harness that was stopped goes on. With runs in an object store (RATCHET_RUNS is
an address) a killed run goes on without the files of its machine. The exit status is 1 if anything
was lost, repeated or different, if it hung, or if a flow took more than five seconds to stop.
"""

import argparse
import json
import os
import shutil
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from random import Random

from benchmarks.interruptions import compare_runs, killable_runs
from benchmarks.interruptions.kill_report import (
    STOPPED,
    VICTIMS,
    WORKER,
    Line,
    Width,
    list_violations,
    report,
)
from benchmarks.interruptions.killable_runs import Stalled, Training
from benchmarks.interruptions.workloads import GIVEN, REAL, RECIPES, TAUGHT, TEACHER, WORKLOADS
from benchmarks.measuring import describe_machine
from ratchet.tasks.storage.run_folder import RunFolder, runs_root, store_address

STARTING = 0.2
"""Share of the kills that come some time after the start; the others come after some bytes."""
AFTER_SECONDS = 0.5
"""Longest time from a write to a kill: an update takes about as long, and writes little."""
ENDING_SECONDS = 60.0
"""A flow that was killed, or has lost its engine, and neither ends nor goes on so long, hangs."""
SPREAD = 0.7
"""Share of a run's bytes over which a trial's kills are spread, on average."""


@dataclass(frozen=True)
class Reference:
    """An uninterrupted run: its contents, its start-up time, and its size."""

    contents: compare_runs.Contents
    startup: float
    """Seconds until the first byte was written."""
    size: int
    """Bytes written."""


@dataclass(frozen=True)
class Trial:
    """One run that is killed: a recipe, how its rollouts are played, and its own number."""

    workload: str
    settings: tuple[str, ...]
    width: Width
    number: int = 0

    @property
    def recipe(self) -> str:
        """Name of the recipe that the settings change."""
        return RECIPES.get(self.workload, "hello")

    def settings_by(self, width: Width) -> tuple[str, ...]:
        """Return all settings; some workloads have none of how rollouts are played."""
        return self.settings if self.workload in GIVEN else (*self.settings, *width.settings)

    @property
    def run(self) -> str:
        """Name of the run."""
        return f"{self.workload}-{self.width}-{self.number:03d}"


@dataclass(frozen=True)
class Harness:
    """Folder of the runs and of the record, and how the runs are killed."""

    folder: Path
    environment: killable_runs.Environment
    seed: int
    each: int
    """Kills of a trial."""
    until: float = float("inf")
    """Monotonic time after which nothing is killed; the runs under way are finished."""

    @property
    def path(self) -> Path:
        """File of the record: a line for each kill, and one for each finished trial."""
        return self.folder / "kills.jsonl"

    @property
    def over(self) -> bool:
        """Whether the time for kills has passed."""
        return time.monotonic() > self.until

    def lines(self) -> list[Line]:
        """Read the record."""
        return compare_runs.read_json_lines(self.path)

    def record(self, trial: Trial, **values: object) -> None:
        """Append a line about a trial in one write: parallel trials share the file."""
        line = {"workload": trial.workload, **asdict(trial.width), "run": trial.run, **values}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def make_reference(harness: Harness, trial: Trial) -> Reference:
    """Run a recipe without a kill, with one rollout batch, or read what such a run has left."""
    name = f"{trial.workload}-lag{trial.width.lag}"
    run = RunFolder(harness.folder / name)
    described = harness.folder / f"{name}.reference.json"
    if not described.exists():
        settings = trial.settings_by(trial.width.reference)
        training = killable_runs.train(run, settings, harness.environment, trial.recipe)
        training.writes(1)
        startup = time.time() - training.started
        if training.exit_code():
            raise SystemExit(f"the reference run failed; see {killable_runs.log_of(run)}")
        values = {"startup": startup, "size": training.written()}
        described.write_text(json.dumps(values), encoding="utf-8")
    values = json.loads(described.read_text(encoding="utf-8"))
    return Reference(compare_runs.read_contents(run), **values)


def run_trial(harness: Harness, trial: Trial) -> None:
    """Kill a run and continue it until it is done; compare it with its reference."""
    run = RunFolder(harness.folder / trial.run)
    if harness.over and not run.path.exists():
        return
    reference = make_reference(harness, trial)
    settings = trial.settings_by(trial.width)
    killed = sum(line["kind"] == "kill" and line["run"] == trial.run for line in harness.lines())
    training = killable_runs.train(run, settings, harness.environment, trial.recipe)
    try:
        while True:
            if training.process.poll() is not None:
                if store_address():
                    shutil.rmtree(run.path, ignore_errors=True)  # another machine goes on
                training = killable_runs.train(run, settings, harness.environment, trial.recipe)
            random = Random(f"{harness.seed}/{trial.run}/{killed}")
            if trial.width.runner == "dask" and killed < harness.each - 1:
                killed += _kill_a_worker(harness, trial, training, reference, random)
            spared = killed == harness.each or harness.over
            if spared or not _kill_at_random(harness, trial, training, reference, random):
                break
            killed += 1
        code = training.exit_code()
    except Stalled as error:
        harness.record(trial, kind="stall", hung=True, error=str(error))
        return
    if code:
        log = killable_runs.log_of(run)
        raise SystemExit(f"{run.name} ended by itself with {code}; see {log}")
    harness.record(
        trial,
        kind="trial",
        kills=killed,
        resumed=bool(killed),
        first_token=compare_runs.seconds_to_first_token(run, training.started),
        differs=compare_runs.differing_parts(compare_runs.read_contents(run), reference.contents),
        **asdict(compare_runs.count_repetitions(run)),
    )


def _kill_a_worker(
    harness: Harness, trial: Trial, training: Training, reference: Reference, random: Random
) -> bool:
    """Kill, at every other start, a process that plays; return whether one was killed."""
    size = random.uniform(1, SPREAD * reference.size / harness.each)
    if random.random() < 0.5 or not training.writes(size) or not training.workers():
        return False
    os.kill(random.choice(training.workers()), signal.SIGKILL)
    stage, load = compare_runs.stage_of(training.run), os.getloadavg()[0]
    resumed = training.size > 0
    harness.record(trial, kind="kill", victim=WORKER, stage=stage, resumed=resumed, load=load)
    return True


def _kill_at_random(
    harness: Harness, trial: Trial, training: Training, reference: Reference, random: Random
) -> bool:
    """Kill a run at a random moment; return False if it ended before."""
    resumed, size = training.size > 0, 0.0
    victim, starting = random.choice(VICTIMS), random.random() < STARTING
    if starting:
        delay = random.uniform(0, reference.startup)
    else:
        size = random.uniform(1, 2 * SPREAD * reference.size / harness.each)
        delay = random.uniform(0, AFTER_SECONDS)
    if not training.writes(training.written() + size) or training.ends_within(delay):
        return False
    working, began = training.written() > 0, time.monotonic()
    if victim in STOPPED:
        os.killpg(training.process.pid, STOPPED[victim])
        hung = not training.ends_within(ENDING_SECONDS)
    else:
        engine = training.engine()
        victim = training.kill(victim)
        hung = not training.ends_or_goes_on(engine, ENDING_SECONDS)
    ending = time.monotonic() - began
    if hung:
        training.abort()
    harness.record(
        trial,
        kind="kill",
        victim=victim,
        ending=ending,
        status=training.process.poll(),
        stage=compare_runs.stage_of(training.run) if working else "starting",
        resumed=resumed,
        first_token=compare_runs.seconds_to_first_token(training.run, training.started),
        hung=hung,
        load=os.getloadavg()[0],
    )
    return True


def list_trials(
    harness: Harness, workloads: Sequence[str], widths: Sequence[Width], kills: int
) -> list[Trial]:
    """List the unfinished trials: `kills` for each width, the workloads in turn."""
    done = {line["run"] for line in harness.lines() if line["kind"] == "trial"}
    runs = -(-kills // harness.each)
    trials = [
        Trial(name, WORKLOADS[name], width, turn // len(workloads))
        for turn in range(runs)
        for name in [workloads[turn % len(workloads)]]
        for width in widths
    ]
    return [trial for trial in trials if trial.run not in done]


def run_all(harness: Harness, trials: Sequence[Trial], parallel: int) -> None:
    """Run trials, several at a time; an error ends those that have not begun."""
    for trial in {(trial.workload, trial.width.lag): trial for trial in trials}.values():
        make_reference(harness, trial)
    with ThreadPoolExecutor(parallel) as threads:
        running = [threads.submit(run_trial, harness, trial) for trial in trials]
        try:
            for ended in as_completed(running):
                ended.result()
        finally:
            threads.shutdown(cancel_futures=True)


def main() -> None:
    """Run the harness from the command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--kills", type=int, default=20, help="kills of each kind of run")
    options.add_argument(
        "--batches", type=int, nargs="+", default=[1], help="rollouts.batches of the runs"
    )
    options.add_argument("--lag", type=int, nargs="+", default=[0], help="rollouts.lag of the runs")
    options.add_argument("--runner", nargs="+", default=["threads"], help="rollouts.runner")
    options.add_argument("--each", type=int, default=10, help="kills of one run")
    options.add_argument("--minutes", type=float, default=float("inf"), help="kill nothing later")
    options.add_argument("--parallel", type=int, default=1, help="trials at the same time")
    options.add_argument("--seed", type=int, default=0, help="seed of the moments and the victims")
    options.add_argument(
        "--folder", type=Path, default=Path("runs/kills"), help="where the runs are kept"
    )
    options.add_argument("--workload", choices=[*WORKLOADS], help="only this one")
    arguments = options.parse_args()
    named = arguments.workload
    names = [named] if named else [name for name in WORKLOADS if name not in (REAL, *RECIPES)]
    folder = runs_root() if store_address() else arguments.folder.absolute()
    print(describe_machine(), flush=True)
    with ExitStack() as stack:
        home = folder / "prefect"
        api = stack.enter_context(killable_runs.prefect_server(home))
        until = time.monotonic() + 60 * arguments.minutes
        variables = killable_runs.environment(home, api)
        harness = Harness(folder, variables, arguments.seed, arguments.each, until)
        chosen = (arguments.batches, arguments.lag, arguments.runner)
        if named in TAUGHT:
            killable_runs.train_to_end(RunFolder(folder / "teacher"), TEACHER, variables)
        widths = [Width(*width) for width in product(*chosen)]
        trials = list_trials(harness, names, widths, arguments.kills)
        run_all(harness, trials, arguments.parallel)
    print(report(harness.lines()))
    raise SystemExit("\n".join(list_violations(harness.lines())) or 0)


if __name__ == "__main__":
    main()
