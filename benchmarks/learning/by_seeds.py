"""An example by several seeds: what it has held out by step, or after each stage.

python -m benchmarks.learning.by_seeds hello-rlhf --seeds 3
python -m benchmarks.learning.by_seeds hello-duel --vary roles.opponent=policy,earlier:4,pool:4

What is sampled is drawn by the seed, so that the same command gives the same table on the same kind
of machine, however busy it is.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.measuring import describe_machine, format_table
from ratchet.flows.recipe.loading import named_recipe
from ratchet.flows.recipe.plan import StagesRecipe
from ratchet.flows.recipe.run_recipe import FlowRecipe, RunRecipe
from ratchet.flows.stages import FLOWS, stages
from ratchet.tasks.reports.facts import read_facts
from ratchet.tasks.storage.plan_record import read_plan
from ratchet.tasks.storage.run_folder import folder_of, name_run

Measured = Mapping[str, float]
"""Number of a checkpoint, or name of a stage → what is held out after it."""


def train_by(example: str, settings: Sequence[str], seed: int, sums: Sequence[str]) -> Measured:
    """Train an example by settings and a seed; return what it has held out, and sums of metrics."""
    recipe = named_recipe(example, settings, FlowRecipe)
    run = name_run(example, *settings, str(seed))
    if isinstance(recipe, StagesRecipe):
        stages(named_recipe(example, [*settings, f"shared.seed={seed}"], StagesRecipe), run=run)
        results = read_plan(folder_of(run)).results
        return {one.stage: one.measured for one in results if one.measured is not None}
    FLOWS[recipe.flow](named_recipe(example, [*settings, f"seed={seed}"], RunRecipe), run=run)
    facts = read_facts(folder_of(run))
    held_out = {str(step): value for step, value in facts.held_out.by_step.items()}
    return held_out | {name: facts.sum(name) for name in sums}


def describe(example: str, measured: Mapping[str, Sequence[Measured]]) -> str:
    """Describe an example by each value of the varied key: the mean of the seeds, and each."""
    names = [*next(iter(measured.values()))[0]]
    rows = [
        [value, *(_describe_seeds([of_seed[name] for of_seed in seeds]) for name in names)]
        for value, seeds in measured.items()
    ]
    return format_table(example, ["", *names], rows)


def _describe_seeds(values: Sequence[float]) -> str:
    return f"{fmean(values):.2f} ({', '.join(f'{value:.2f}' for value in values)})"


def main() -> None:
    """Run the benchmark from the command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("example", help="a deployment that trains, or a YAML file")
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--vary", default="", help="KEY=VALUE,VALUE: a line of the table for each")
    options.add_argument("--set", action="append", default=[], help="a key of every recipe")
    options.add_argument("--sum", action="append", default=[], help="a metric: a column of its sum")
    options.add_argument("--folder", type=Path, default=Path("runs/by_seeds"))
    arguments = options.parse_args()
    os.environ["RATCHET_RUNS"] = str(arguments.folder)
    print(describe_machine(), flush=True)
    key, _, values = arguments.vary.partition("=")
    varied = {f"`{value}`": [f"{key}={value}"] for value in values.split(",")} if key else {"": []}
    measured = {
        value: [
            train_by(arguments.example, [*own, *arguments.set], seed, arguments.sum)
            for seed in range(arguments.seeds)
        ]
        for value, own in varied.items()
    }
    print(describe(arguments.example, measured))


if __name__ == "__main__":
    main()
