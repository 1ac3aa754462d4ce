"""Every method on one task: what the agent earns after each, what it took, and a table of it.

python -m benchmarks.learning.methods --seeds 3 --picture docs/pictures/methods.svg

The agent is `hello`; its reward is of 128 held-out examples, sampled. Distillation has the run of
rewards of the same seed as its teacher, unless it teaches itself. Tokens and seconds are those of
the method's own run. The picture has the reward after each quarter of a run, too.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measuring import describe_machine, format_table
from benchmarks.pictures.methods import Point, average, draw
from ratchet.flows.evaluate import evaluate
from ratchet.flows.recipe.loading import named_recipe
from ratchet.flows.recipe.run_recipe import RunRecipe
from ratchet.flows.stages import FLOWS
from ratchet.tasks.recording.step_log import read_metrics, spent_seconds
from ratchet.tasks.storage.run_folder import folder_of

BEST = """
select run, rollout_id from rollouts where split = 'train' and {steps}
qualify row_number() over (partition by run, group_id order by reward desc, rollout_id) = 1
"""
"""Query of the best rollout of each group."""
TWICE = "You are $identity. Who are you? You are $identity. Who are you?"


@dataclass(frozen=True)
class Method:
    """A method: the deployment that trains by it, and what is changed in its recipe."""

    title: str
    deployment: str
    changes: tuple[str, ...] = ()


METHODS = {
    "rewards": Method("rewards", "hello"),
    "texts": Method("texts", "hello-finetune"),
    "best": Method(
        "the best of 8 rollouts of the first half of the run of rewards, as texts",
        "hello-finetune",
        (
            "epochs=1",
            "dataset.path=null",
            "dataset.runs=rewards-{seed}",
            f"dataset.query={BEST.format(steps='step < 10')}",
            f"dataset.held_out={BEST.format(steps='step >= 10')}",
        ),
    ),
    "pairs": Method("pairs", "hello-prefer"),
    "after": Method(
        "pairs after texts",
        "hello-prefer",
        ("model.start=texts-{seed}@50", "epochs=0.5", "optimizer.learning_rate=0.0002"),
    ),
    "chord": Method("rewards and texts (CHORD)", "hello-chord", ("steps=8",)),
    "alone": Method("rewards alone, of as few steps", "hello", ("steps=8",)),
    "teacher": Method("a teacher", "hello-distil", ("algorithm.teacher.models=rewards-{seed}",)),
    "told": Method(
        "itself as a teacher that has read the question twice before",
        "hello-distil",
        ("steps=20", "algorithm.teacher.models=base", f"algorithm.teacher.reads={TWICE}"),
    ),
    "likeliest": Method(
        "a teacher's 20 likeliest tokens in the texts",
        "hello-finetune",
        ("teacher.model=rewards-{seed}@20",),
    ),
    "reversed": Method(
        "the same by the reverse divergence",
        "hello-finetune",
        ("teacher.model=rewards-{seed}@20", "teacher.divergence=reverse_kl"),
    ),
}
"""Beginning of the runs' names → their method."""
QUARTERS = 4
BY_QUARTER = ("method", "before", "1/4", "2/4", "3/4", "end")
COLUMNS = ("method", "agent's reward", "of each seed", "sampled tokens", "trained tokens", "s")


def train_by(name: str, seed: int, settings: Sequence[str]) -> list[Point]:
    """Train by a method; return the agent's reward before it and after each quarter."""
    method, run = METHODS[name], f"{name}-{seed}"
    changes = (change.replace("{seed}", str(seed)) for change in method.changes)
    recipe = named_recipe(method.deployment, [*changes, f"seed={seed}", *settings], RunRecipe)
    FLOWS[recipe.flow](recipe, run=run)
    rows = read_metrics(folder_of(run).metrics)
    steps = [round(len(rows) * part / QUARTERS) for part in range(QUARTERS + 1)]
    measured = {step: measure(run, step, rows[:step]) for step in {*steps}}
    return [measured[step] for step in steps]


def measure(run: str, step: int, rows: Sequence[Mapping[str, float]]) -> Point:
    """Return the agent's reward at a checkpoint, and what the steps before it took."""
    recipe = named_recipe("hello", ["evaluation.greedy=false"])
    reward = evaluate(recipe, model=f"{run}@{step}").scores["sampled"].finished.mean
    assert reward is not None, "every agent of hello earns a reward"
    sampled, trained = (
        sum(row.get(name, 0) for row in rows) for name in ("tokens/sampled", "tokens/trained")
    )
    return Point(reward, sampled, trained, spent_seconds(rows))


def describe(measured: Mapping[str, Sequence[Sequence[Point]]]) -> str:
    """Describe methods by the means over seeds of what each came to at its end."""
    rows = []
    for name, seeds in measured.items():
        each = ", ".join(f"{points[-1].reward:.2f}" for points in seeds)
        last = average(seeds)[-1]
        rows.append(
            [
                METHODS[name].title,
                f"{last.reward:.2f}",
                each,
                f"{last.sampled:,.0f}",
                f"{last.trained:,.0f}",
                f"{last.seconds:.0f}",
            ]
        )
    return format_table("Methods", COLUMNS, rows)


def describe_quarters(measured: Mapping[str, Sequence[Sequence[Point]]]) -> str:
    """Describe methods by the means over seeds of the reward before each and after its quarters."""
    rows = [
        [METHODS[name].title, *(f"{point.reward:.2f}" for point in average(seeds))]
        for name, seeds in measured.items()
    ]
    return format_table("Reward after each quarter", BY_QUARTER, rows)


def main() -> None:
    """Run the benchmark from the command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--only", choices=[*METHODS], nargs="+", default=[*METHODS])
    options.add_argument("--set", action="append", default=[], help="a key of every recipe")
    options.add_argument("--folder", type=Path, default=Path("runs/methods"))
    options.add_argument("--picture", type=Path, help="file of the picture")
    arguments = options.parse_args()
    os.environ["RATCHET_RUNS"] = str(arguments.folder)
    print(describe_machine(), flush=True)
    measured = {
        name: [train_by(name, seed, arguments.set) for seed in range(arguments.seeds)]
        for name in arguments.only
    }
    print(describe(measured), describe_quarters(measured), sep="\n")
    if arguments.picture is not None:
        titles = {METHODS[name].title: average(seeds) for name, seeds in measured.items()}
        draw(titles, arguments.picture)


if __name__ == "__main__":
    main()
