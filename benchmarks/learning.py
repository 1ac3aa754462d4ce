"""Picture of what runs have learnt: rewards by minutes of sampling and training.

python -m benchmarks.learning RUN [RUN ...] --out docs/learning.svg
"""

import argparse
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from tasks.evaluations import Estimate, read_evaluation
from tasks.metrics import read_metrics
from tasks.storage.manifest import recipe_of
from tasks.storage.run_folder import RunFolder, folder_of

SAMPLING = "sampled"
"""Way of sampling whose evaluations are drawn and compared."""
SECONDS = ("seconds/sampling", "seconds/training")
"""Endings of metrics' names: each policy has its training."""


@dataclass(frozen=True)
class LearningCurve:
    """Rewards of a run's agent, by minutes."""

    agent: str
    helpers: tuple[str, ...]
    """Roles beside the policy."""
    minutes: list[float]
    """Minutes of sampling and training at the end of each step, without evaluations."""
    rewards: list[float]
    """Mean reward of each step's rollouts, which the weights before the step sampled."""
    held_out: dict[float, tuple[float, float]]
    """Mean reward of held-out examples and its standard error, by the minutes before."""


def read_held_out(run: RunFolder, step: int) -> Estimate:
    """Read the rewards of held-out examples at checkpoint `step`, sampled as in training."""
    return read_evaluation(run.evaluation(f"{step:05d}"))[SAMPLING].finished


def read_curve(run: RunFolder) -> LearningCurve:
    """Read the curve of a run that has begun."""
    steps = read_metrics(run.metrics)
    seconds = (sum(step[name] for name in step if name.endswith(SECONDS)) for step in steps)
    minutes = [*accumulate(spent / 60 for spent in seconds)]
    scored = dict[float, tuple[float, float]]()
    for step, after in enumerate([0.0, *minutes]):
        if run.evaluation(f"{step:05d}").exists():
            estimate = read_held_out(run, step)
            scored[after] = estimate.mean or 0.0, estimate.standard_error or 0.0
    rewards = [step["reward/mean"] for step in steps]
    recipe = recipe_of(run)
    return LearningCurve(recipe["agent"], tuple(recipe["roles"]), minutes, rewards, scored)


def draw(runs: list[LearningCurve], out: Path) -> None:
    """Draw a panel for each run; the same runs give the same bytes."""
    mpl.rcParams["svg.hashsalt"] = "ratchet"
    figure, panels = plt.subplots(
        1, len(runs), figsize=(4.2 * len(runs), 3.2), sharey=True, squeeze=False
    )
    for panel, run in zip(panels[0], runs, strict=True):
        _draw_panel(panel, run)
    panels[0][0].set_ylabel("mean reward")
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


def _draw_panel(panel: Axes, run: LearningCurve) -> None:
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
    """Draw the runs that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", help="names of folders under runs/")
    parser.add_argument("--out", type=Path, default=Path("docs/learning.svg"))
    arguments = parser.parse_args()
    draw([read_curve(folder_of(run)) for run in arguments.runs], arguments.out)


if __name__ == "__main__":
    main()
