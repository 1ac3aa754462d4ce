"""`ratchet train` on texts or pairs beside the Tinker cookbook's `supervised.train` or `train_dpo`.

python -m benchmarks.beside_cookbook.texts [--recipe hello-finetune] [--steps 12] [--kill-at 7]
    [--save-every 4] [--base BASE]

Both train the same texts, or by `--recipe hello-prefer` the same pairs, in the same order on
engines that are started alike; the cookbook is unmodified, in an environment of its own (`make
peers`). It starts at checkpoint 0 of the run of `ratchet train`, so that the weights are equal,
with the same rank, Adam and constant learning rate, and the sum over the tokens of texts, or the
mean over pairs. Its program compares the tokens that its own renderer makes, and which are trained,
before it trains. Each trains twice: undisturbed, and killed by SIGKILL when `--kill-at` steps are
recorded, and started again by the same command, or by `ratchet resume`.

A step lasts from when its batch is drawn until the next one's is. By design these differ:

- `ratchet train` is a Prefect flow, keeps each step as Parquet and the weights of every step. The
  cookbook keeps a state every `--save-every` steps.
- The cookbook submits the next step of texts before it waits for the last one. Of pairs it scores
  each step's by its reference, which `ratchet train` scores all of before the first step.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.beside_cookbook.rollouts import COOKBOOK, ROOT
from benchmarks.measuring import Comparison, describe_machine, format_table, note
from ratchet.adapters.calls import POLICY
from ratchet.adapters.tinker.engines import running_engine
from ratchet.engine.model.base_models import find
from ratchet.flows.recipe.given_recipes import FinetuneRecipe, PreferRecipe
from ratchet.flows.recipe.loading import named_recipe
from ratchet.tasks.algorithm.preferences import SIDES
from ratchet.tasks.checkpoints import Ledger
from ratchet.tasks.recording.step_log import read_metrics
from ratchet.tasks.storage.run_folder import RunFolder
from ratchet.tasks.storage.tables import read_table

PROGRAM = Path(__file__).with_name("cookbook_texts.py")
SETTINGS = {
    "hello-finetune": ("batch.normalisation=fixed", "batch.divisor=1"),
    "hello-prefer": (),
}
"""Recipes that are compared, and the settings in which they differ from the cookbook's."""
RENDERER = "qwen3_instruct"
"""Renderer of the cookbook that writes the tiny model's own template."""
FIRST, CLOSE = 10, 1e-4
"""Steps whose losses are compared, and the largest difference of equal ones."""


@dataclass(frozen=True)
class Trained:
    """A run: each step's loss as it was recorded last, its seconds, and when it drew batches."""

    losses: Sequence[float]
    seconds: float
    drawn: Sequence[float]

    @property
    def step_seconds(self) -> float:
        """Median of the seconds between batches."""
        return median(later - earlier for earlier, later in pairwise(self.drawn))


def main() -> None:
    """Run the benchmark from the command line."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--recipe", choices=SETTINGS, default="hello-finetune")
    options.add_argument("--steps", type=int, default=12, help="of each run")
    options.add_argument("--kill-at", type=int, default=7, help="recorded steps at the kill")
    options.add_argument("--save-every", type=int, default=4, help="steps between states")
    options.add_argument("--base", default="local/tiny-chat", help="base model")
    given = options.parse_args()
    if not COOKBOOK.exists():
        options.error(f"the cookbook is not installed: there is no {COOKBOOK}; run `make peers`")
    print(describe_machine(), flush=True)
    settings = [
        f"steps={given.steps}",
        f"checkpoints.every={given.save_every}",
        f"model.base={given.base}",
        "optimizer.schedule=constant",
        "evaluation.examples=2",
        *SETTINGS[given.recipe],
    ]
    with tempfile.TemporaryDirectory() as scratch:
        whole = train_both(Path(scratch) / "whole", given.recipe, settings, None)
        killed = train_both(Path(scratch) / "killed", given.recipe, settings, given.kill_at)
    print(report(given.recipe, whole, killed))


def train_both(
    folder: Path, name: str, settings: Sequence[str], kill_at: int | None
) -> dict[str, Trained]:
    """Train by `ratchet train` and then by the cookbook, on engines with the same state."""
    folder.mkdir()
    recipe = named_recipe(name, settings, FinetuneRecipe if "finetune" in name else PreferRecipe)
    base, state, run = recipe.model.base, folder / "engine", RunFolder(folder / name)
    ratchet = [sys.executable, "-m", "ratchet.flows.cli.main"]
    begin = [*ratchet, "train", name, "--run", name]
    begin += [part for setting in settings for part in ("--set", setting)]
    where = {"RATCHET_RUNS": str(folder), "PREFECT_HOME": str(folder.parent / "prefect")}
    commands = [begin, [*ratchet, "resume", name]]
    seconds = run_killed(base, state, commands, where, (run.metrics, kill_at))
    times = [run.datums(POLICY, step).stat().st_mtime for step in range(recipe.steps)]
    rows = read_metrics(run.metrics)
    ours = Trained([row["loss"] for row in rows], seconds, times)
    plan, log, drawn = folder / "plan.json", folder / "log", folder / "drawn.jsonl"
    plan.write_text(json.dumps(make_plan(recipe, run, drawn)), encoding="utf-8")
    command: list[str] = [str(COOKBOOK), str(PROGRAM), str(plan), str(log)]
    seconds = run_killed(base, state, [command] * 2, {}, (log / "metrics.jsonl", kill_at))
    lines = read_lines(log / "metrics.jsonl")
    key = "train_mean_nll" if isinstance(recipe, FinetuneRecipe) else "dpo_loss"
    losses = {row["step"]: row[key] for row in lines if key in row}
    times = [row["at"] for row in read_lines(drawn)]
    theirs = Trained([losses[step] for step in sorted(losses)], seconds, times)
    return {"ratchet train": ours, "cookbook": theirs}


def make_plan(recipe: FinetuneRecipe | PreferRecipe, run: RunFolder, drawn: Path) -> dict[str, Any]:
    """Make the cookbook's plan: the texts of each step, their tokens, and the settings.

    The texts of a pair follow one another, the chosen one first.
    """
    known = recipe.sources()["train"].examples()
    examples = {f"{row['example_id']}": row["example"] for row in known}

    def texts(step: int) -> list[dict[str, Any]]:
        rows = read_table(run.datums(POLICY, step)).to_pylist()
        return [
            {
                "messages": _messages(examples[row["group_id"]], row.get("side")),
                "tokens": row["tokens"],
                "targets": row["targets"],
                "weights": row["advantages"] if row.get("side") is None else row["mask"],
            }
            for row in rows
        ]

    optimizer = recipe.optimizer
    return {
        "method": "texts" if isinstance(recipe, FinetuneRecipe) else "pairs",
        "renderer": RENDERER,
        "drawn": str(drawn),
        "steps": [texts(step) for step in range(recipe.steps)],
        "config": {
            "model_name": find(recipe.model.base).name,
            "load_checkpoint_path": Ledger(run.checkpoints(POLICY)).at(0).state,
            "lora_rank": recipe.model.lora_rank,
            "learning_rate": optimizer.learning_rate,
            "adam_beta1": optimizer.beta1,
            "adam_beta2": optimizer.beta2,
            "adam_eps": optimizer.eps,
            "save_every": recipe.checkpoints.every,
        },
    }


def _messages(example: Mapping[str, Any], side: int | None) -> Sequence[Mapping[str, str]]:
    if side is None:
        return example["messages"]
    said = {"user": example["prompt"], "assistant": example[SIDES[side]]}
    return [{"role": role, "content": text} for role, text in said.items()]


def run_killed(
    base: str,
    state: Path,
    commands: Sequence[Sequence[str]],
    environment: Mapping[str, str],
    kill: tuple[Path, int | None],
) -> float:
    """Run the first command on a new engine, kill it, and run the second; return all seconds.

    It is killed when a file has so many lines; without a number it runs to its end, alone.
    """
    (log, lines), (first, then) = kill, commands
    with running_engine(base, state) as server:
        service = {"TINKER_BASE_URL": str(server.url), "TINKER_API_KEY": str(server.key)}
        offline = {"HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0"}
        all_of_it = {**os.environ, **service, **offline, **environment}
        started = time.monotonic()
        if lines is not None:
            process = subprocess.Popen(
                first,
                cwd=ROOT,
                env=all_of_it,
                start_new_session=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            while process.poll() is None and not (
                log.exists() and log.read_bytes().count(b"\n") >= lines
            ):
                time.sleep(0.005)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        done = subprocess.run(
            first if lines is None else then,
            cwd=ROOT,
            env=all_of_it,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        seconds = time.monotonic() - started
    if done.returncode:
        raise SystemExit(f"{' '.join(first)} ended with {done.returncode}:\n{done.stdout[-4000:]}")
    return seconds


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def report(name: str, whole: Mapping[str, Trained], killed: Mapping[str, Trained]) -> str:
    """Format the losses of the first steps, and a row for each program."""
    ours, theirs = (run.losses for run in whole.values())
    off = _differences(*whole.values())[:FIRST]
    own, other = ([run.step_seconds] for run in whole.values())
    note(Comparison(f"a step of {name}", own, [*whole][1], other, limit="1.0"))
    rows = [
        [f"{step + 1}", f"{ours[step]:.5f}", f"{theirs[step]:.5f}", f"{off[step]:.1e}"]
        for step in range(len(off))
    ]
    header = ("step", *(f"loss: {side}" for side in whole), "difference")
    equal = "equal" if max(off) <= CLOSE else "NOT EQUAL"
    kills = [
        [
            side,
            f"{whole[side].step_seconds:.2f}",
            f"{whole[side].seconds:.0f}",
            f"{killed[side].seconds - whole[side].seconds:+.0f}",
            f"{max(_differences(whole[side], killed[side])):.1e}",
        ]
        for side in whole
    ]
    columns = (
        "",
        "s a step",
        "s in all",
        "s more by the kill",
        "largest difference of a loss to the run without a kill",
    )
    return (
        f"{format_table(f'{name}, the first steps', header, rows)}\n"
        f"The losses are {equal} to {CLOSE:g}.\n\n{format_table('SIGKILL', columns, kills)}\n"
    )


def _differences(one: Trained, other: Trained) -> list[float]:
    """List by how much the losses of two runs differ, step by step."""
    return [abs(a - b) for a, b in zip(one.losses, other.losses, strict=True)]


if __name__ == "__main__":
    main()
