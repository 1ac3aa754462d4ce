"""Every benchmark in one go: the tables of each, and at the end one table of all.

    python -m benchmarks.bench

The machine must have nothing else to do. A peer that `make peers` has not installed is left out.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measuring import COMPARED, COMPARISONS, Comparison, describe_machine, format_table

ROOT = Path(__file__).parent.parent
BENCHMARKS: dict[str, Sequence[Sequence[str]]] = {
    "run_speed": [()],
    "starts": [()],
    "engine.speed": [("--rounds", "5", "--cores", "1")],
    "engine.shared_prefixes": [("--rounds", "5", "--cores", "1")],
    "durability": [()],
    "door.load": [("--rounds", "2", "--agents", "openai")],
    "places": [()],
    "recording.assembly": [()],
    "growth.long_runs": [
        ("--recorded", "20", "10000"),
        (
            *("--recipe", "hello", "--recorded", "20", "3000", "--steps", "30", "--window", "22"),
            *("--set", "rollouts.groups=2", "--set", "rollouts.group_size=4"),
            *("--set", "evaluation.every=1000", "--set", "evaluation.examples=1"),
            *("--set", "evaluation.greedy=false"),
        ),
    ],
    "beside_cookbook.texts": [
        ("--recipe", recipe, "--steps", "20", "--kill-at", "11")
        for recipe in ("hello-finetune", "hello-prefer")
    ],
    "beside_cookbook.rollouts": [("--steps", "6", "--lag", lag) for lag in ("0", "1")],
}
"""Module → the arguments of each of its runs."""
PEERS = {name: ROOT / ".venv-cookbook" for name in BENCHMARKS if name.startswith("beside_cookbook")}
"""Module → environment without which it cannot run."""


def main() -> None:
    """Run the benchmarks from the command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--only", nargs="+", default=[*BENCHMARKS], choices=BENCHMARKS)
    options.add_argument("more", nargs="*", help="arguments for each of them, after --")
    arguments = options.parse_args()
    machine, failed = describe_machine(), list[str]()
    with tempfile.TemporaryDirectory() as scratch:
        noted = Path(scratch) / "comparisons.jsonl"
        for name in arguments.only:
            if PEERS.get(name, ROOT).exists():
                for given in BENCHMARKS[name]:
                    if run(name, [*given, *arguments.more], noted):
                        failed.append(name)
        lines = noted.read_text(encoding="utf-8").splitlines()
    rows = [Comparison(**json.loads(line)).row() for line in lines]
    print(f"{machine}Commit {commit()}.\n")
    print(format_table("All benchmarks", COMPARED, rows))
    if failed:
        raise SystemExit(f"these benchmarks failed: {', '.join(failed)}; see their words above")


def run(name: str, arguments: Sequence[str], noted: Path) -> int:
    """Run a benchmark, which prints its own tables and notes its lines of the table of all."""
    print(f"## benchmarks.{name} {' '.join(arguments)}\n", flush=True)
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    environment = {**os.environ, COMPARISONS: str(noted)}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def commit() -> str:
    """Name the commit that is measured, and say so if files differ from it."""
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


if __name__ == "__main__":
    main()
