"""Self-play by its opponents: the score against the untrained model, by step.

python -m benchmarks.self_play --seeds 3

The agent is `duel`; its score is between -1 and 1. What is sampled is drawn by the seed, so that
the same command gives the same table on the same kind of machine, however busy it is.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.measuring import describe_machine, format_table
from flows.recipe.loading import named_recipe
from flows.train import train
from tasks.checkpoints import read_held_out
from tasks.storage.run_folder import folder_of, name_run

OPPONENTS = ("policy", "earlier:4", "pool:4")


def score_by_step(opponent: str, seed: int, settings: Sequence[str]) -> Mapping[int, float]:
    """Train against an opponent; return the score of each checkpoint that was evaluated."""
    own = [f"roles.opponent={opponent}", f"seed={seed}", "evaluation.greedy=false"]
    run = name_run(opponent, str(seed))
    train(named_recipe("hello-duel", [*own, *settings]), run=run)
    return read_held_out(folder_of(run)).by_step


def describe(scores: Mapping[str, Sequence[Mapping[int, float]]]) -> str:
    """Describe opponents by the mean score after each step, and by that of each seed at the end."""
    steps = sorted(next(iter(scores.values()))[0])
    rows = [
        [
            f"`{opponent}`",
            *(f"{fmean(of_seed[step] for of_seed in seeds):.2f}" for step in steps),
            ", ".join(f"{of_seed[steps[-1]]:.2f}" for of_seed in seeds),
        ]
        for opponent, seeds in scores.items()
    ]
    return format_table("Self-play", ["opponent", *map(str, steps), "of each seed"], rows)


def main() -> None:
    """Run the benchmark from the command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--only", choices=OPPONENTS, nargs="+", default=OPPONENTS)
    options.add_argument("--set", action="append", default=[], help="a key of every recipe")
    options.add_argument("--folder", type=Path, default=Path("runs/self_play"))
    arguments = options.parse_args()
    os.environ["RATCHET_RUNS"] = str(arguments.folder)
    print(describe_machine(), flush=True)
    scores = {
        opponent: [score_by_step(opponent, seed, arguments.set) for seed in range(arguments.seeds)]
        for opponent in arguments.only
    }
    print(describe(scores))


if __name__ == "__main__":
    main()
