"""The golden record: checksums of what small runs of every kind end with, compared between commits.

    python -m benchmarks.interruptions.golden

makes the record where there is none, and otherwise trains the same runs and names each part that
differs. A change that is not meant to change a result leaves the record as it is. Records of other
processors are not compared, since their sums are rounded otherwise.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from benchmarks.interruptions import killable_runs
from benchmarks.interruptions.compare_runs import Contents, read_contents
from benchmarks.interruptions.workloads import TEACHER, WORKLOADS
from benchmarks.measuring import describe_machine
from ratchet.tasks.storage.files import write_text
from ratchet.tasks.storage.run_folder import RunFolder

Parts = Mapping[str, str]
"""Part of a run's contents → the SHA-256 of its JSON."""


@dataclass(frozen=True)
class GoldenRun:
    """A run of the record: its recipe and settings, or the run that it is made of, and how."""

    settings: Sequence[str] = ()
    recipe: str = "hello"
    derived: Sequence[str] = ()
    """Command and options that make the run of another, such as `fork RUN --at 2`."""


HELLO = (*TEACHER[1:], "steps=4")
TEXTS = (
    "steps=6",
    "epochs=0",
    "batch.examples=8",
    "evaluation.every=3",
    "evaluation.examples=16",
    "checkpoints.every=3",
)
PAIRS = ("batch.pairs=6", *(setting for setting in TEXTS if not setting.startswith("batch")))
SOURCES = (
    "dataset.path=null",
    "dataset.sources={a: {path: datasets/hello_texts.jsonl, share: 2}, "
    "b: {path: datasets/hello_texts.jsonl, share: 1}}",
)

RUNS: dict[str, GoldenRun] = {
    "teacher": GoldenRun(TEACHER),
    "plain": GoldenRun(HELLO),
    "batches": GoldenRun((*HELLO, "rollouts.batches=4")),
    "dask": GoldenRun((*HELLO, "rollouts.batches=2", "rollouts.runner=dask")),
    "lag": GoldenRun((*HELLO, "rollouts.lag=2")),
    "streamed": GoldenRun((*HELLO, "rollouts.batches=2", "rollouts.stream=true")),
    "policies": GoldenRun((*WORKLOADS["whispers"], "steps=3")),
    "rounds": GoldenRun((*HELLO, "rollouts.rounds=3")),
    "kl": GoldenRun((*HELLO, "algorithm.kl.coefficient=0.1")),
    "distilled": GoldenRun((*WORKLOADS["distil"], "steps=4"), "hello-distil"),
    "expert": GoldenRun((*WORKLOADS["chord"], "steps=4"), "hello-chord"),
    "judged": GoldenRun((*WORKLOADS["judged"], "steps=4"), "hello-judged"),
    "taught": GoldenRun((*TEXTS, *SOURCES, "teacher.model=teacher@6"), "hello-finetune"),
    "dpo": GoldenRun(PAIRS, "hello-prefer"),
    "orpo": GoldenRun((*PAIRS, "preference.loss=orpo"), "hello-prefer"),
    "stages": GoldenRun(WORKLOADS["stages"], "hello-stages"),
    "fork": GoldenRun(derived=("fork", "plain", "--at", "2")),
    "replay": GoldenRun(derived=("replay", "plain", "--set", "algorithm.advantage=centred")),
}
EVERY = tuple(Contents.__annotations__)
EQUAL = ("batches", "dask", "fork")
"""Runs that equal the plain one of the same commit."""


def train_all(folder: Path, names: Sequence[str], at_once: int) -> dict[str, Parts]:
    """Train runs into a folder, those that are made of others last; return their checksums."""
    home = folder / "prefect"
    with (
        killable_runs.prefect_server(home) as api,
        ThreadPoolExecutor(at_once) as threads,
    ):
        environment = killable_runs.environment(home, api)
        first = [name for name in names if name == "teacher"]
        plain = [name for name in names if not RUNS[name].derived and name not in first]
        derived = [name for name in names if RUNS[name].derived]
        for block in (first, plain, derived):
            list(threads.map(lambda name: _make(folder, name, environment), block))
    return {name: _digests(read_contents(RunFolder(folder / name))) for name in names}


def differences(found: Mapping[str, Parts], record: Mapping[str, Parts]) -> list[str]:
    """List the runs and parts that differ from the record, or from what they must equal."""
    pairs = [(name, record.get(name), "its record") for name in found]
    pairs += [(name, found["plain"], "plain") for name in EQUAL if {name, "plain"} <= {*found}]
    return [
        f"{name}: {part} differs from {called}"
        for name, other, called in pairs
        for part in EVERY
        if other is None or found[name][part] != other[part]
    ]


def _make(folder: Path, name: str, environment: killable_runs.Environment) -> None:
    wanted, run = RUNS[name], RunFolder(folder / name)
    if not wanted.derived:
        killable_runs.train_to_end(run, wanted.settings, environment, wanted.recipe)
        return
    command = [sys.executable, "-m", "ratchet.flows.cli.main", *wanted.derived, "--run", name]
    variables = {**environment, "RATCHET_RUNS": str(folder)}
    with killable_runs.log_of(run).open("ab") as log:
        done = subprocess.run(
            command,
            cwd=killable_runs.ROOT,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"{run.path} failed; see {killable_runs.log_of(run)}")


def _digests(contents: Contents) -> Parts:
    return {
        part: sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
        for part, value in contents.items()
    }


def main() -> None:
    """Make the record, or compare with it; the exit status is 1 if anything differs."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--folder", type=Path, default=Path("runs/golden"), help="of the runs")
    options.add_argument("--record", type=Path, default=Path("runs/golden.json"), help="its file")
    options.add_argument("--only", nargs="+", choices=[*RUNS], help="only these runs")
    options.add_argument("--at-once", type=int, default=2, help="runs at the same time")
    arguments = options.parse_args()
    folder, path = arguments.folder.absolute(), arguments.record.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    found = train_all(folder, arguments.only or [*RUNS], arguments.at_once)
    machine = describe_machine().partition("; load")[0]
    if not path.exists():
        write_text(path, json.dumps({"machine": machine, "runs": found}, indent=1))
        print(f"The record of {len(found)} run(s) is {path}.")
        return
    record = json.loads(path.read_text(encoding="utf-8"))
    if record["machine"] != machine:
        raise SystemExit(f"{path} is of another machine ({record['machine']}); remove it")
    differ = differences(found, record["runs"])
    print("\n".join(differ) or f"All {len(found)} runs equal the record.")
    raise SystemExit(bool(differ))


if __name__ == "__main__":
    main()
