"""`ratchet train people` beside the Tinker cookbook's own `rl.train` on the same task.

python -m benchmarks.beside_cookbook.rollouts [--steps 12] [--seeds 3] [--lag 1] [--set KEY=VALUE]

For each seed the cookbook trains, and then `ratchet train`, each on a new engine that was started
alike. The cookbook is unmodified, in an environment of its own (`make peers`). Equal are the base
model, the examples of each step and their order, the tokens of the prompts, the agent's reward,
group sizes, temperature, stop tokens, longest answers, centred advantages, loss, rank and layers of
the LoRA, Adam, and that the training state is saved with the last step only. The cookbook's program
compares the prompts before anything is sampled; those that Ratchet recorded are compared at the
end.

A step lasts from the start of its sampling until its new weights can be sampled. The time between
steps, in which either writes metrics, counts in a run's time alone, and so do its start and end.
With `--lag` both sample ahead of the weights, the cookbook by its asynchronous loop, and a step
lasts from the weights of the step before; the first is left out. The ratio is one of means, since
two steps ahead end together.
By design these differ:

- `ratchet train` derives the seeds of the LoRA and of each call from the run's. `rl.train` gives
  none to the service, so it never repeats, and its seed here chooses the order of examples alone.
- `ratchet train` is a Prefect flow. It plays the agent, a client of the OpenAI API, journals each
  call before it is answered, and keeps each step as Parquet and the weights of every step. The
  cookbook samples in its own process, logs a summary of each rollout and keeps the last weights.
- `ratchet train` trains no rollout whose advantage is 0. The cookbook, by
  `remove_constant_reward_groups`, trains no group of equal rewards, unless there is no other: then
  it trains one, whose gradient is 0, where `ratchet train` keeps the weights. Its asynchronous loop
  would sample others in their place, so with `--lag` it trains every group. At the end of the data
  that loop drops groups that are too old, and the last steps with them; these are not compared.
- `ratchet train` plays one held-out example beside the first step and one after the last, the least
  that is possible. The cookbook has no evaluation here.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pyarrow.parquet as pq
from transformers import AutoTokenizer

from benchmarks.measuring import Comparison, describe_machine, format_table, note, paired_ratio
from benchmarks.peers.formulas import PEERS
from benchmarks.timelines import begin_of_step
from ratchet.adapters.calls import POLICY
from ratchet.adapters.project.modules import load_agent_file
from ratchet.adapters.rendering.chat import Chat
from ratchet.adapters.tinker.engines import running_engine
from ratchet.engine.model.base_models import find
from ratchet.flows.recipe.loading import named_recipe
from ratchet.flows.recipe.recipe import Recipe
from ratchet.tasks.examples.shards import choose_examples
from ratchet.tasks.recording.spans import LLM
from ratchet.tasks.recording.step_log import read_metrics
from ratchet.tasks.storage.names import shard_name
from ratchet.tasks.storage.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
COOKBOOK = PEERS["cookbook"].python
PROGRAM = Path(__file__).with_name("cookbook_people.py")
NAME = "people"
UNSCORED = ("evaluation.examples=1", "evaluation.greedy=false")
SIDES = ("ratchet train", "cookbook")


@dataclass(frozen=True)
class Step:
    """A step: its mean reward, sampled tokens, trained rollouts and seconds."""

    reward: float
    sampled: int
    trained: int
    seconds: float


@dataclass(frozen=True)
class Run:
    """A run: its steps, and the seconds from its program's start to its end."""

    steps: Sequence[Step]
    seconds: float


Pair = tuple[Run, Run]
"""Runs of `ratchet train` and of the cookbook by the same seed."""


def main() -> None:
    """Run the benchmark from the command line."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--steps", type=int, default=12, help="of each run")
    options.add_argument("--seeds", type=int, default=3, help="runs of each program")
    options.add_argument("--lag", type=int, default=0, help="steps that rollouts are ahead")
    options.add_argument("--set", action="append", default=[], help="KEY=VALUE of the recipe")
    given = options.parse_args()
    if not COOKBOOK.exists():
        options.error(f"the cookbook is not installed: there is no {COOKBOOK}; run `make peers`")
    print(describe_machine(), flush=True)
    settings = [*given.set, f"steps={given.steps}", f"checkpoints.every={given.steps}", *UNSCORED]
    settings.append(f"rollouts.lag={given.lag}")
    with tempfile.TemporaryDirectory() as scratch:
        folders = {seed: Path(scratch) / f"seed-{seed}" for seed in range(given.seeds)}
        pairs = [train_both(folders[seed], [*settings, f"seed={seed}"]) for seed in folders]
    print(report(pairs, given.lag))


def train_both(folder: Path, settings: Sequence[str]) -> Pair:
    """Train by the cookbook and then by `ratchet train`, each on a new engine."""
    recipe = named_recipe(NAME, settings)
    base, plan, log = recipe.model.base, folder / "plan.json", folder / "log"
    folder.mkdir()
    planned = make_plan(recipe)
    plan.write_text(json.dumps(planned), encoding="utf-8")
    command = [COOKBOOK, PROGRAM, plan, log]
    seconds = run_on_engine(base, folder / "engine-of-cookbook", command, {})
    theirs = Run(read_log(log, recipe.rollouts.lag), seconds)
    overrides = [part for setting in settings for part in ("--set", setting)]
    command = [
        sys.executable,
        "-m",
        "ratchet.flows.cli.main",
        "train",
        NAME,
        "--run",
        NAME,
        *overrides,
    ]
    where = {"RATCHET_RUNS": str(folder), "PREFECT_HOME": str(folder.parent / "prefect")}
    seconds = run_on_engine(base, folder / "engine-of-ratchet", command, where)
    run = RunFolder(folder / NAME)
    check_prompts(run, planned)
    ours = Run(read_steps(run, recipe.rollouts.lag), seconds)
    print(f"{folder.name}: {ours}, {theirs}", file=sys.stderr, flush=True)
    return ours, theirs


def make_plan(recipe: Recipe) -> dict[str, Any]:
    """Make the cookbook's plan: the examples of each step, their prompts, and the settings."""
    base, agent = find(recipe.model.base), load_agent_file(recipe.agent)
    chat = Chat(AutoTokenizer.from_pretrained(base.folder), recipe.model.renderer)
    examples = recipe.train_split().examples()
    shards = [
        choose_examples(examples, recipe.seed, step, recipe.rollouts.groups)
        for step in range(recipe.steps)
    ]

    def group(example: dict[str, Any]) -> dict[str, Any]:
        asked = agent.question(example["text"])
        return {
            "example": example,
            "prompt": chat.render([{"role": "user", "content": asked}], []),
        }

    return {
        "agent": agent.__file__,
        "stop": chat.stop_tokens,
        "group_size": recipe.rollouts.group_size,
        "lag": recipe.rollouts.lag,
        "steps": [[group(row["example"]) for row in shard] for shard in shards],
        "config": {
            "model_name": base.name,
            "lora_rank": recipe.model.lora_rank,
            "loss_fn": recipe.algorithm.loss,
            "learning_rate": recipe.optimizer.learning_rate,
            "max_tokens": recipe.rollouts.max_tokens,
            "temperature": recipe.rollouts.temperature,
            "save_every": recipe.checkpoints.every,
        },
    }


def run_on_engine(
    base: str, state: Path, command: Sequence[str | Path], environment: Mapping[str, str]
) -> float:
    """Run a program to its end, as a client of a new engine; return the seconds it took."""
    with running_engine(base, state) as server:
        service = {"TINKER_BASE_URL": str(server.url), "TINKER_API_KEY": str(server.key)}
        offline = {"HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0"}
        started = time.monotonic()
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **service, **offline, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        seconds = time.monotonic() - started
    if done.returncode:
        called = " ".join(map(str, command))
        raise SystemExit(f"{called} ended with {done.returncode}:\n{done.stdout[-4000:]}")
    return seconds


def check_prompts(run: RunFolder, plan: Mapping[str, Any]) -> None:
    """Check that a run asked by the tokens of the plan, each group as often as planned."""
    for step, groups in enumerate(plan["steps"]):
        sealed = run.sealed(shard_name("train", step))
        tables = (pq.read_table(path, columns=["kind", "prompt_token_ids"]) for path in sealed)
        rows = (row for table in tables for row in table.to_pylist())
        asked = [row["prompt_token_ids"] for row in rows if row["kind"] == LLM]
        planned = [group["prompt"] for group in groups for _ in range(plan["group_size"])]
        if sorted(asked) != sorted(planned):
            raise SystemExit(f"step {step} of ratchet train asked by other tokens than planned")


def read_steps(run: RunFolder, lag: int) -> list[Step]:
    """Read the steps of a run of `ratchet train`.

    A step begins with its first call, and its update is written when the weights are saved.
    """
    steps: list[Step] = []
    last = None
    for step, row in enumerate(read_metrics(run.metrics)):
        begun, ended = begin_of_step(run, step), run.update(POLICY, step).stat().st_mtime
        sampled, trained = int(row["tokens/sampled"]), int(row["datums"])
        since = begun if last is None else last
        steps.append(Step(row["reward/mean"], sampled, trained, ended - since))
        last = ended if lag else None
    return steps[1:] if lag else steps


def read_log(log: Path, lag: int) -> list[Step]:
    """Read the steps of a run of the cookbook.

    Its metrics are of the groups that it trained, its summaries of all rollouts. Its `time/total`
    ends with a sampling client of the new weights, and with it the summaries are written.
    """
    steps: list[Step] = []
    ends: list[float] = []
    for row in _read_lines(log / "metrics.jsonl"):
        folder = log / f"iteration_{row['step']:06d}"
        summaries = folder / "train_rollout_summaries.jsonl"
        rollouts = _read_lines(summaries)
        ends.append(summaries.stat().st_mtime)
        reward = fmean(rollout["total_reward"] for rollout in rollouts)
        sampled = sum(turn["ac_len"] for rollout in rollouts for turn in rollout["steps"])
        seconds = ends[-1] - ends[-2] if lag and len(ends) > 1 else row["time/total"]
        steps.append(Step(reward, sampled, row["env/all/total_episodes"], seconds))
    return steps[1:] if lag else steps


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def report(pairs: Sequence[Pair], lag: int) -> str:
    """Format a row for each step and for all: means over the seeds, and medians of seconds."""
    sides = [[*runs] for runs in zip(*pairs, strict=True)]
    steps = min(len(run.steps) for runs in sides for run in runs)
    last = max(1, steps // 4)
    spans = {str(number + 1): slice(number, number + 1) for number in range(steps)}
    spans |= {f"last {last}": slice(steps - last, steps), "all": slice(0, steps)}
    rows = [
        [name, *(measure(runs, span) for measure in MEASURES.values() for runs in sides)]
        for name, span in spans.items()
    ]
    header = ("step", *(f"{what}: {side}" for what in MEASURES for side in SIDES))
    took = [[fmean(step.seconds for step in run.steps) for run in runs] for runs in sides]
    called = f"a step of {NAME}" + (f", rollouts {lag} step ahead" if lag else "")
    note(Comparison(called, took[0], SIDES[1], took[1], limit="0.8" if lag else "1.0"))
    whole = [_range(median, [run.seconds for run in runs], ".0f") for runs in sides]
    return (
        f"{format_table(f'{NAME}, {steps} steps, runs of each: {len(pairs)}', header, rows)}\n"
        f"A step of `ratchet train` takes {paired_ratio(*took):.2f} of the cookbook's time. From "
        f"its program's start to its end, a run took {whole[0]} s and {whole[1]} s.\n"
    )


def _range(middle: Callable[[Sequence[float]], float], values: Sequence[float], form: str) -> str:
    """Format the mean or the median, and the range of several values."""
    several = f" ({min(values):{form}}-{max(values):{form}})" if len(values) > 1 else ""
    return f"{middle(values):{form}}{several}"


def _rewards(runs: Sequence[Run], span: slice) -> str:
    return _range(fmean, [fmean(step.reward for step in run.steps[span]) for run in runs], ".2f")


def _tokens(runs: Sequence[Run], span: slice) -> str:
    return f"{fmean(sum(step.sampled for step in run.steps[: span.stop]) for run in runs):,.0f}"


def _trained(runs: Sequence[Run], span: slice) -> str:
    return f"{fmean(sum(step.trained for step in run.steps[span]) for run in runs):,.0f}"


def _seconds(runs: Sequence[Run], span: slice) -> str:
    return _range(median, [step.seconds for run in runs for step in run.steps[span]], ".1f")


MEASURES: Mapping[str, Callable[[Sequence[Run], slice], str]] = {
    "reward": _rewards,
    "tokens so far": _tokens,
    "trained": _trained,
    "seconds": _seconds,
}


if __name__ == "__main__":
    main()
