"""Finished programs behind the door: each is installed, and played by what a file says.

    python -m benchmarks.programs.played

The table has what each program asked, and what would be trained of it. A program that cannot be
installed here is left out by name. Programs of `ratchet init` are projects of that kind; the others
are the folders of `projects`.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measuring import describe_machine, format_table
from ratchet.adapters.calls import POLICY
from ratchet.adapters.places.cage import NoCage, check_cage
from ratchet.flows.cli.new_project import FACTS, PROJECT_KINDS, Kind, write_files
from ratchet.tasks.recording.journal import read_spans
from ratchet.tasks.recording.spans import LLM, REFUSED, REWARD
from ratchet.tasks.reports.dryruns import read_kept_tokens
from ratchet.tasks.storage.run_folder import RunFolder
from ratchet.tasks.storage.tables import read_table

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".programs"
"""Folder with a project for each program, in which it stays installed."""
READY = ".ready"
"""File of an installed program with the pins that it was installed by."""
SAY = "say.jsonl"
INSTALL_SECONDS, PLAY_SECONDS = 900, 600
HEADER = (
    *("program", "version", "dialect", "answered", "refused", "first prompt", "turns kept"),
    *("trajectories", "tokens that differ", "reward", "seconds"),
)


def programs() -> dict[str, Kind]:
    """Return the kinds of projects whose agent is a program of a package index, by name."""
    further = sorted(Path(__file__).with_name("projects").glob(f"*/{FACTS}"))
    return {
        **{name: kind for name, kind in PROJECT_KINDS.items() if kind.install},
        **{path.parent.name: Kind.read(path.parent) for path in further},
    }


class LeftOut(Exception):
    """Reason why a program is not played here."""


@dataclass(frozen=True)
class Row:
    """What was recorded of a program that was played."""

    version: str
    dialects: Mapping[str, int]
    refused: int
    first_prompt: int
    turns: str
    trajectories: int
    differing: int
    rewards: Sequence[float]
    seconds: float

    def cells(self, name: str) -> list[str]:
        rewards = ", ".join(f"{reward:g}" for reward in self.rewards) or "none"
        numbers = sum(self.dialects.values()), self.refused, self.first_prompt
        return [
            *(name, self.version, ", ".join(self.dialects)),
            *(f"{number:,}" for number in numbers),
            *(self.turns, str(self.trajectories), str(self.differing), rewards),
            f"{self.seconds:.0f}",
        ]


def main() -> None:
    """Play the programs from the command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--only", nargs="+", default=[*programs()], choices=programs())
    options.add_argument("--folder", type=Path, default=FOLDER)
    arguments = options.parse_args()
    machine, rows, left_out, wrong = describe_machine(), list[list[str]](), dict[str, str](), []
    for name in arguments.only:
        try:
            project = install(programs()[name], arguments.folder.absolute() / name)
        except LeftOut as reason:
            left_out[name] = str(reason)
            continue
        row = play(programs()[name], project)
        rows.append(row.cells(name))
        if row.differing or not row.trajectories:
            wrong.append(name)
        print(" | ".join(rows[-1]), flush=True)
    print(f"\n{machine}")
    print(format_table("Programs as they come", HEADER, rows))
    for name, reason in left_out.items():
        print(f"{name} was left out: {reason}")
    if wrong:
        raise SystemExit(f"not trained as sampled: {', '.join(wrong)}; see their lines above")


def install(kind: Kind, project: Path) -> Path:
    """Write the project of a program, and install the program there if its pins are new.

    Raises LeftOut if this machine cannot install it.
    """
    for path in (files := kind.files()):
        (project / path).unlink(missing_ok=True)
    shutil.rmtree(project / "runs", ignore_errors=True)
    write_files(project, kind)
    ready, pins = project / "program" / READY, _pins(files)
    if not ready.exists() or ready.read_text(encoding="utf-8") != pins:
        _run_install(kind.install, project)
        ready.write_text(pins, encoding="utf-8")
    return project


def _run_install(line: str, project: Path) -> None:
    tool = line.split()[0]
    if shutil.which(tool) is None:
        raise LeftOut(f"there is no {tool} here")
    try:
        done = subprocess.run(
            ["sh", "-c", line],
            cwd=project,
            capture_output=True,
            text=True,
            timeout=INSTALL_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise LeftOut(f"{line!r} took longer than {INSTALL_SECONDS} s") from None
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise LeftOut(f"{line!r} ended with {done.returncode}: {said[0]}")


def _pins(files: Mapping[Path, str]) -> str:
    """Return the file of a project that pins its program's version."""
    names = (Path("program") / name for name in ("package.json", "requirements.txt"))
    return next(files[name] for name in names if name in files)


def version_of(files: Mapping[Path, str]) -> str:
    """Return the version to which the files of a project pin its program."""
    pins = _pins(files)
    if pins.startswith("{"):
        return next(iter(json.loads(pins)["dependencies"].values()))
    return pins.split("==")[1].split()[0]


@cache
def cage_options() -> Sequence[str]:
    """Return the options for a machine that makes no cage; a file alone says what is run there."""
    try:
        check_cage()
    except NoCage as error:
        print(f"played without a cage: {error}")
        return ("--set", "place.cage=none", "--set", "place.reads=[]")
    return ()


def play(kind: Kind, project: Path) -> Row:
    """Play a program by what its file says, through the door; return what was recorded."""
    told = ["dryrun", kind.name, "--keep", "--say", SAY, *cage_options()]
    words = [sys.executable, "-m", "ratchet.flows.cli.main", *told]
    began = time.monotonic()
    done = subprocess.run(
        words,
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PLAY_SECONDS,
    )
    took = time.monotonic() - began
    runs = sorted((project / "runs" / "dryruns").glob("*/manifest.json"))
    if not runs:
        raise SystemExit(f"{project.name} was not played: {done.stderr[-2000:]}")
    return read_row(RunFolder(runs[-1].parent), version_of(kind.files()), took)


def read_row(run: RunFolder, version: str, seconds: float) -> Row:
    """Read what was recorded of the rollouts of a dry run."""
    sealed, _ = run.all_spans()
    spans = [span for path in sealed for span in read_spans(path).to_pylist()]
    calls = [span for span in spans if span["kind"] == LLM and span["role"] == POLICY]
    first = next(iter([one for one in calls if json.loads(one["tools"])] or calls), None)
    rows = read_table(run.trajectories(POLICY, 0)).to_pylist()
    trajectories = [row for row in rows if row["role"] == POLICY]
    turns = [kept for kept in read_kept_tokens(run.trajectories(POLICY, 0)) if kept.turns]
    return Row(
        version=version,
        dialects=Counter(json.loads(call["attributes"]).get("dialect", "") for call in calls),
        refused=sum(span["kind"] == REFUSED for span in spans),
        first_prompt=len(first["prompt_token_ids"]) if first else 0,
        turns=", ".join(f"{one.kept} of {one.turns}" for one in turns) or "none",
        trajectories=len(trajectories),
        differing=count_differing(trajectories, calls),
        rewards=[span["reward"] for span in spans if span["kind"] == REWARD],
        seconds=seconds,
    )


def count_differing(
    trajectories: Sequence[Mapping[str, Any]], calls: Sequence[Mapping[str, Any]]
) -> int:
    """Count the sampled tokens that are trained otherwise, and trained ones that nobody sampled.

    A call is trained as it was sampled if a trajectory of its rollout begins with its prompt and
    its answer, and has their log-probabilities.
    """
    sampled = differing = 0
    for call in calls:
        prompt, answer = call["prompt_token_ids"], call["response_token_ids"]
        begins, ends = len(prompt), len(prompt) + len(answer)
        logprobs = np.array(call["logprobs"], np.float32)
        sampled += len(answer)
        if not any(
            one["tokens"][:ends] == [*prompt, *answer]
            and all(one["mask"][begins:ends])
            and np.array_equal(np.array(one["logprobs"][begins:ends], np.float32), logprobs)
            for one in trajectories
            if one["rollout_id"] == call["rollout_id"]
        ):
            differing += len(answer)
    return differing + abs(sum(sum(one["mask"]) for one in trajectories) - sampled)


if __name__ == "__main__":
    main()
