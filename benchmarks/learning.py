"""A plot of runs: the reward of every step, and on held-out examples, by minutes of training.

python -m benchmarks.learning RUN [RUN ...] --out docs/learning.svg
"""

import argparse
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from tasks.checkpoints import Ledger
from tasks.evaluations import read_evaluation
from tasks.metrics import read_metrics
from tasks.storage.run_folder import folder_of, recipe_of

HOW = "sampled"
SECONDS = ("seconds/sampling", "seconds/training")
"""Suffixes of metrics' names, which begin with the policy."""


@dataclass(frozen=True)
class Learning:
    """The rewards of a run's agent."""

    agent: str
    helpers: tuple[str, ...]
    """The roles other than the policy."""
    minutes: list[float]
    """Minutes of sampling and training at the end of each step, without evaluations."""
    rewards: list[float]
    """Mean reward of each step's rollouts, sampled with the weights before the step."""
    held_out: dict[float, tuple[float, float]]
    """Minutes of training → mean reward on held-out examples and its standard error."""


def learning(run: str) -> Learning:
    """Read the rewards of a run that has begun."""
    folder = folder_of(run)
    steps = read_metrics(folder / "metrics.jsonl")
    seconds = (sum(step[name] for name in step if name.endswith(SECONDS)) for step in steps)
    minutes = [*accumulate(spent / 60 for spent in seconds)]
    ledger, scored = Ledger(folder / "checkpoints.jsonl"), dict[float, tuple[float, float]]()
    for step, after in enumerate([0.0, *minutes]):
        path = folder / "evaluations" / f"{ledger.at(step).version}.json"
        if path.exists():
            estimate = read_evaluation(path)[HOW].finished
            scored[after] = estimate.mean or 0.0, estimate.standard_error or 0.0
    rewards = [step["reward/mean"] for step in steps]
    recipe = recipe_of(folder)
    return Learning(recipe["agent"], tuple(recipe["roles"]), minutes, rewards, scored)


def draw(runs: list[Learning], out: Path) -> None:
    """Draw one panel per run; the same runs give the same bytes."""
    mpl.rcParams["svg.hashsalt"] = "ratchet"
    figure, panels = plt.subplots(
        1, len(runs), figsize=(4.2 * len(runs), 3.2), sharey=True, squeeze=False
    )
    for panel, run in zip(panels[0], runs, strict=True):
        _panel(panel, run)
    panels[0][0].set_ylabel("mean reward")
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


def _panel(panel: Axes, run: Learning) -> None:
    begun = [0.0, *run.minutes[:-1]]
    panel.plot(begun, run.rewards, color="tab:blue", marker=".", label="a step's rollouts")
    means, errors = zip(*run.held_out.values(), strict=True)
    panel.errorbar(
        list(run.held_out),
        means,
        errors,
        color="tab:orange",
        fmt="o",
        capsize=4,
        label="held out ± s.e.",
    )
    title = " with ".join(filter(None, [run.agent, ", ".join(run.helpers)]))
    panel.set(title=title, xlabel="minutes of sampling and training", ylim=(0, 1.02))
    panel.grid(alpha=0.3)
    panel.legend(loc="lower right")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", help="names of folders under runs/")
    parser.add_argument("--out", type=Path, default=Path("docs/learning.svg"))
    asked = parser.parse_args()
    draw([learning(run) for run in asked.runs], asked.out)


if __name__ == "__main__":
    main()
