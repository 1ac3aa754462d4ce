"""Reward and time of `ratchet train people`, beside the Tinker cookbook's own RL loop.

Both train the same base on the same examples in the same order, with the same agent's question and
reward, group sizes, LoRA, learning rate and loss, each on a new engine. The cookbook runs in its
own environment (`make peers`). What differs: seeds of sampling, the cookbook's epsilon of Adam
(1e-8), and that it neither records nor scores anything.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median
from typing import Any

from adapters.tinker.bases import name_for_clients
from adapters.tinker.service import connect
from benchmarks.measuring import describe_machine, format_table
from flows.recipe.loading import named_recipe
from flows.recipe.recipe import Recipe
from tasks.metrics import read_metrics
from tasks.reports.progress import step_seconds
from tasks.shards import read_shard
from tasks.storage.names import shard_name
from tasks.storage.run_folder import RunFolder

ROOT = Path(__file__).parent.parent
COOKBOOK = ROOT / ".venv-cookbook" / "bin" / "python"
PROGRAM = Path(__file__).parent / "peers" / "cookbook_people.py"
UNSCORED = ("evaluation.examples=1", "evaluation.greedy=false")
RUN = "people"
Step = tuple[float, float, float]
"""Reward, sampled tokens and seconds of a step."""


def main() -> None:
    """Run the benchmark from the command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=16, help="of each program")
    steps = options.parse_args().steps
    settings = [f"steps={steps}", *UNSCORED]
    recipe = named_recipe("people", settings)
    print(describe_machine())
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        ours = train_by_ratchet(folder, settings)
        plan = folder / "plan.json"
        plan.write_text(json.dumps(make_plan(recipe, RunFolder(folder / RUN))), encoding="utf-8")
        theirs = train_by_cookbook(folder, recipe, plan)
    print(report(ours, theirs))


def train_by_ratchet(folder: Path, settings: Sequence[str]) -> list[Step]:
    """Train by the command, without an evaluation that counts."""
    command = [sys.executable, "-m", "flows.cli.main", "train", "people", "--run", RUN]
    overrides = [part for setting in settings for part in ("--set", setting)]
    home = {"RATCHET_RUNS": str(folder), "PREFECT_HOME": str(folder / "prefect")}
    end([*command, *overrides], home)
    run = RunFolder(folder / RUN)
    rows = read_metrics(run.metrics)
    return [
        (row["reward/mean"], row["tokens/sampled"], seconds)
        for row, seconds in zip(rows, step_seconds(run, len(rows)), strict=True)
    ]


def make_plan(recipe: Recipe, run: RunFolder) -> dict[str, Any]:
    """Return the examples of each step of a run, and the settings that both programs share."""
    shards = [read_shard(run.shard(shard_name("train", step))) for step in range(recipe.steps)]
    return {
        "base": name_for_clients(recipe.model.base),
        "steps": [[row["example"] for row in shard] for shard in shards],
        "group_size": recipe.rollouts.group_size,
        "max_tokens": recipe.rollouts.max_tokens,
        "learning_rate": recipe.optimizer.learning_rate,
        "lora_rank": recipe.model.lora_rank,
    }


def train_by_cookbook(folder: Path, recipe: Recipe, plan: Path) -> list[Step]:
    """Train by the cookbook's loop, on an engine of its own."""
    log, agent = folder / "log", ROOT / "agents" / "json_fields.py"
    with connect(recipe.model.base, folder / "engine") as service:
        named = {"TINKER_BASE_URL": str(service.server.url), "TINKER_API_KEY": service.server.key}
        offline = {"HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0"}
        command = [str(COOKBOOK), str(PROGRAM), str(plan), str(agent), str(log)]
        end(command, {name: str(value) for name, value in (named | offline).items()})
    lines = (log / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [
        (
            row["env/all/reward/total"],
            row["env/all/total_ac_tokens"],
            row["time/total"],
        )
        for row in rows
        if "env/all/reward/total" in row
    ]


def end(command: Sequence[str], environment: dict[str, str]) -> None:
    """Run a program to its end."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")


def report(ours: Sequence[Step], theirs: Sequence[Step]) -> str:
    """Format both programs' steps, and what they took."""
    tokens = [[*accumulate(step[1] for step in steps)] for steps in (ours, theirs)]
    rows = [
        [str(number), f"{a[0]:.2f}", f"{b[0]:.2f}", f"{left:,.0f}", f"{right:,.0f}"]
        for number, (a, b, left, right) in enumerate(zip(ours, theirs, *tokens, strict=True), 1)
    ]
    header = ("step", "reward", "cookbook's", "sampled tokens", "cookbook's")
    took = [[step[2] for step in steps] for steps in (ours, theirs)]
    seconds = [f"{median(one):.1f} s ({min(one):.1f}-{max(one):.1f})" for one in took]
    last = [fmean(step[0] for step in steps[-4:]) for steps in (ours, theirs)]
    return (
        f"{format_table('People, by ratchet train and by the cookbook', header, rows)}\n"
        f"A step of ours took {seconds[0]}, of the cookbook's {seconds[1]}: "
        f"{median(took[0]) / median(took[1]):.2f} of it. The last four steps' reward was "
        f"{last[0]:.2f} and {last[1]:.2f}.\n"
    )


if __name__ == "__main__":
    main()
