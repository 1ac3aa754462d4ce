"""A sweep of replays beside the same sweep sampled anew: which advantage each finds best, its cost.

python -m benchmarks.learning.replayed_sweep --seeds 3

The agent is `hello`. The first advantage's run is the one whose rollouts the replays train on, so
that its own replay has its weights. Rewards are of held-out examples, which both sweeps sample.
"""

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.measuring import describe_machine, format_table
from ratchet.flows.recipe.loading import named_recipe
from ratchet.flows.recipe.plan import SweepRecipe
from ratchet.flows.recipe.run_recipe import RunRecipe
from ratchet.flows.sweep import sweep
from ratchet.tasks.recording.step_log import read_metrics
from ratchet.tasks.storage.run_folder import folder_of

ADVANTAGES = ("standardized", "centred", "maxrl", "reinforce_plus_plus")
KEY = "algorithm.advantage"
COLUMNS = ("advantage", "sampled anew", "of each seed", "rank", "replayed", "of each seed", "rank")


@dataclass(frozen=True)
class Swept:
    """A sweep: its runs, the held-out reward of each, the tokens they train on, and its seconds."""

    runs: tuple[str, ...]
    rewards: tuple[float, ...]
    tokens: int
    """Tokens that were sampled for the sweep alone, to be trained on."""
    seconds: float


def train(
    recipe: RunRecipe, advantages: Sequence[str], name: str, replayed: str | None = None
) -> Swept:
    """Train a sweep over the advantages."""
    values = {"base": recipe.model_dump(mode="json"), "grid": {KEY: advantages}}
    begun = time.monotonic()
    results = sweep(SweepRecipe.model_validate({**values, "replay": replayed}), run=name).results
    seconds = time.monotonic() - begun
    rows = [row for one in results for row in read_metrics(folder_of(one.run).metrics)]
    tokens = 0 if replayed else sum(int(row["tokens/sampled"]) for row in rows)
    rewards = tuple(_measured(one.measured, one.error) for one in results)
    return Swept(tuple(one.run for one in results), rewards, tokens, seconds)


def _measured(reward: float | None, error: str) -> float:
    assert reward is not None, error
    return reward


def compare(advantages: Sequence[str], seed: int, settings: Sequence[str]) -> tuple[Swept, Swept]:
    """Train both sweeps by a seed: the one that is sampled anew, and the one of replays."""
    recipe = named_recipe("hello", [*settings, f"seed={seed}"], RunRecipe)
    anew = train(recipe, advantages, f"anew-{seed}")
    return anew, train(recipe, advantages, f"replays-{seed}", anew.runs[0])


def describe(advantages: Sequence[str], by_seed: Sequence[tuple[Swept, Swept]]) -> str:
    """Describe the sweeps by the means over seeds, and what each has cost."""
    parts = [_columns(sweeps) for sweeps in zip(*by_seed, strict=True)]
    rows = [
        [name, *(cell for part in parts for cell in part[at])] for at, name in enumerate(advantages)
    ]
    table = format_table("Held-out reward by advantage", COLUMNS, rows)
    anew, replays = zip(*by_seed, strict=True)
    costs = [
        f"{name}: {fmean(one.tokens for one in of):,.0f} tokens sampled to be trained on, "
        f"{fmean(one.seconds for one in of):.0f} s"
        for name, of in (("sampled anew", anew), ("replayed, after the run", replays))
    ]
    return "\n".join([table, *costs])


def _columns(sweeps: Sequence[Swept]) -> list[tuple[str, str, str]]:
    """Return the mean of each advantage, its rewards by seed, and its rank among the means."""
    rewards = [*zip(*(one.rewards for one in sweeps), strict=True)]
    means = [fmean(of) for of in rewards]
    return [
        (
            f"{mean:.3f}",
            ", ".join(f"{reward:.2f}" for reward in of),
            str(1 + sum(m > mean for m in means)),
        )
        for mean, of in zip(means, rewards, strict=True)
    ]


def main() -> None:
    """Run the benchmark from the command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--steps", type=int, default=6)
    options.add_argument("--advantages", nargs="+", default=ADVANTAGES)
    options.add_argument("--set", action="append", default=[], help="a key of every recipe")
    options.add_argument("--folder", type=Path, default=Path("runs/replayed_sweep"))
    arguments = options.parse_args()
    os.environ["RATCHET_RUNS"] = str(arguments.folder)
    print(describe_machine(), flush=True)
    settings = [f"steps={arguments.steps}", *arguments.set]
    chosen = arguments.advantages
    print(describe(chosen, [compare(chosen, seed, settings) for seed in range(arguments.seeds)]))


if __name__ == "__main__":
    main()
