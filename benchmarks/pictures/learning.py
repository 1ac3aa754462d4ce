"""Pictures of what runs have learnt: rewards by minutes, or beside answers before and after.

python -m benchmarks.pictures.learning RUN [RUN ...] --out docs/learning.svg
python -m benchmarks.pictures.learning RUN --answers 4 --out docs/pictures/hello.png
"""

import argparse
import json
import textwrap
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from ratchet.tasks.recording.queries import answer_query
from ratchet.tasks.recording.scores import Estimate, read_evaluation
from ratchet.tasks.recording.step_log import read_metrics
from ratchet.tasks.storage.manifest import recipe_of
from ratchet.tasks.storage.run_folder import RunFolder, folder_of

SAMPLING = "sampled"
"""Way of sampling whose evaluations are drawn and compared."""
SECONDS = ("seconds/sampling", "seconds/training")
"""Endings of metrics' names: each policy has its training."""

ANSWERS = """
select asked, list(said order by step) as said, list(reward order by step) as rewards
from rollouts
join calls using (run, rollout_id, attempt, split, step)
where split = 'test' and step in (0, (select max(step) from evaluations))
group by example_id, asked
having count(*) = 2
order by example_id
"""
"""Held-out examples, by what was answered to them before and after the training."""
LETTERS = 58
"""Width of an answer in the picture, in letters."""


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


def draw_answers(run: RunFolder, examples: int, out: Path) -> None:
    """Draw the reward by step, beside what the first held-out examples were answered."""
    figure, (curve, texts) = plt.subplots(1, 2, figsize=(9.6, 3.4), width_ratios=(2, 3))
    rewards = [step["reward/mean"] for step in read_metrics(run.metrics)]
    curve.plot(rewards, color="tab:blue", marker=".")
    curve.set(xlabel="step", ylabel="mean reward of a step's rollouts", ylim=(0, 1.02))
    curve.grid(alpha=0.3)
    texts.set_axis_off()
    rows = json.loads(answer_query(ANSWERS, [run], "json"))[:examples]
    top, height = 0.97, 1.0 / examples
    for place, row in enumerate(rows):
        y = top - place * height
        asked = textwrap.shorten(row["asked"].partition("\n")[0], LETTERS, placeholder=" …")
        texts.text(0, y, asked, weight="bold", va="top", fontsize=10)
        said = zip(
            ("before", f"after {len(rewards)} steps"), row["said"], row["rewards"], strict=True
        )
        for line, (when, words, reward) in enumerate(said, start=1):
            short = textwrap.shorten(words, LETTERS, placeholder=" …")
            color = "tab:green" if reward == 1 else "tab:orange" if reward else "tab:red"
            texts.text(0.02, y - 0.3 * height * line, when, va="top", fontsize=9, color="0.4")
            texts.text(0.24, y - 0.3 * height * line, short, va="top", fontsize=10, color=color)
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=100)


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
    parser.add_argument("--answers", type=int, help="examples that the first run is drawn beside")
    arguments = parser.parse_args()
    if arguments.answers:
        draw_answers(folder_of(arguments.runs[0]), arguments.answers, arguments.out)
        return
    draw([read_curve(folder_of(run)) for run in arguments.runs], arguments.out)


if __name__ == "__main__":
    main()
