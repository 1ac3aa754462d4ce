"""Picture of a run that is killed several times, beside an uninterrupted run of its recipe.

python -m benchmarks.interruptions.resumed_run --kills 6 --out docs/pictures/resumed-run.png
"""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks.interruptions import compare_runs, killable_runs
from tasks.recording.step_log import read_metrics
from tasks.storage.run_folder import RunFolder

VICTIM = "flow and engine"
AFTER_SECONDS = 0.5
"""Longest time from a write to a kill."""
BLUE, PALE, RED = "#08306b", "#9ecae1", "#cb181d"
CROSS_HEIGHT = 1.09


@dataclass(frozen=True)
class Kill:
    """A kill: how many steps were done, and what the run was doing."""

    step: int
    stage: str


def run_killed(
    run: RunFolder, size: int, kills: int, environment: killable_runs.Environment
) -> list[Kill]:
    """Train hello, killed at moments spread over `size` bytes, and started again after each."""
    random, noted = Random(0), []
    for number in range(kills):
        training = killable_runs.train(run, (), environment)
        target = size * (number + random.uniform(0.2, 0.8)) / kills
        delay = random.uniform(0, AFTER_SECONDS)
        if not training.writes(target - training.size) or training.ends_within(delay):
            raise SystemExit(f"{run.path} ended before kill {number + 1} of {kills}")
        training.kill(VICTIM)
        training.process.wait()
        noted.append(Kill(len(read_metrics(run.metrics)), compare_runs.stage_of(run)))
    killable_runs.train_to_end(run, (), environment)
    return noted


def draw(run: RunFolder, reference: RunFolder, kills: list[Kill], out: Path) -> None:
    """Draw the reward of every step of both runs, and the kills."""
    figure, axes = plt.subplots(figsize=(8.4, 3.9))
    rewards = _rewards(reference)
    wide = axes.plot(rewards, color=PALE, linewidth=10, solid_capstyle="round", zorder=2)
    thin = axes.plot(_rewards(run), color=BLUE, linewidth=1.4, marker="o", markersize=4, zorder=3)
    for kill in kills:
        _draw_kill(axes, kill, last=kill.step == len(rewards))
    cross = axes.plot([], [], color=RED, linestyle="", marker="X", markersize=7)
    labels = [
        "never interrupted",
        f"killed {len(kills)} times and resumed",
        "SIGKILL to flow and engine, during …",
    ]
    lines = [*wide, *thin, *cross]
    figure.legend(lines, labels, loc="lower center", ncols=3, frameon=False)
    axes.set(
        xlabel="step",
        ylabel=f"mean reward of {_rollouts(run)} rollouts",
        xlim=(-1, len(rewards)),
        ylim=(0, CROSS_HEIGHT + 0.06),
        xticks=range(0, len(rewards), 2),
        yticks=[0, 0.25, 0.5, 0.75, 1],
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=160, metadata={"Software": None})


def _draw_kill(axes: Axes, kill: Kill, *, last: bool) -> None:
    place = kill.step - 0.5
    axes.vlines(place, 0, CROSS_HEIGHT, RED, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
    axes.plot(place, CROSS_HEIGHT, marker="X", color=RED, markersize=7, zorder=4)
    side, shift = ("right", -7) if last else ("left", 7)
    axes.annotate(
        kill.stage,
        (place, CROSS_HEIGHT),
        xytext=(shift, 0),
        textcoords="offset points",
        ha=side,
        va="center",
        color=RED,
        fontsize=9,
    )


def _rewards(run: RunFolder) -> list[float]:
    return [row["reward/mean"] for row in read_metrics(run.metrics)]


def _rollouts(run: RunFolder) -> int:
    return int(read_metrics(run.metrics)[0]["rollouts/ok"])


def main() -> None:
    """Train both runs, compare them, and draw them."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--kills", type=int, default=6)
    options.add_argument("--folder", type=Path, default=Path("runs/resumed"))
    options.add_argument("--out", type=Path, default=Path("docs/pictures/resumed-run.png"))
    arguments = options.parse_args()
    folder = arguments.folder.absolute()
    reference, run = RunFolder(folder / "hello"), RunFolder(folder / "killed")
    path = folder / "killed.json"
    if not path.exists():
        with killable_runs.prefect_server(folder / "prefect") as api:
            environment = killable_runs.environment(folder / "prefect", api)
            killable_runs.train_to_end(reference, (), environment)
            size = killable_runs.size_of(reference)
            kills = run_killed(run, size, arguments.kills, environment)
        path.write_text(json.dumps([asdict(kill) for kill in kills]), encoding="utf-8")
    kills = [Kill(**kill) for kill in json.loads(path.read_text(encoding="utf-8"))]
    contents = compare_runs.read_contents(run), compare_runs.read_contents(reference)
    if differing := compare_runs.differing_parts(*contents):
        raise SystemExit(f"the killed run differs in {', '.join(differing)}")
    draw(run, reference, kills, arguments.out)
    print(f"{arguments.out}: equal weights, optimizer, datums, metrics and evaluations; {kills}")


if __name__ == "__main__":
    main()
