"""Picture of what methods earn by seconds, by sampled tokens and by trained tokens."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import matplotlib as mpl
from matplotlib import pyplot as plt

MARKERS = "os^vD<>pP*X"
PANELS = {
    "seconds": "seconds of sampling and training",
    "sampled": "tokens sampled",
    "trained": "tokens trained",
}
"""Field of a point → what it is, a panel each."""


class Point(NamedTuple):
    """Held-out reward of an agent at a checkpoint, and what the steps before it took."""

    reward: float
    sampled: float
    trained: float
    seconds: float


def average(seeds: Sequence[Sequence[Point]]) -> list[Point]:
    """Return the means over seeds of runs that were measured at the same steps."""
    return [
        Point(*(fmean(values) for values in zip(*points, strict=True)))
        for points in zip(*seeds, strict=True)
    ]


def draw(methods: Mapping[str, Sequence[Point]], out: Path) -> None:
    """Draw a panel for each cost, with a curve of each method."""
    mpl.rcParams["svg.hashsalt"] = "ratchet"
    figure, panels = plt.subplots(1, len(PANELS), figsize=(13, 5.4), sharey=True)
    colours = plt.get_cmap("tab20").colors  # pyright: ignore[reportAttributeAccessIssue]
    for panel, (field, said) in zip(panels, PANELS.items(), strict=True):
        for number, (title, points) in enumerate(methods.items()):
            panel.plot(
                [getattr(point, field) for point in points],
                [point.reward for point in points],
                color=colours[number % len(colours)],
                marker=MARKERS[number % len(MARKERS)],
                label=title,
            )
        panel.set_xscale("symlog", linthresh=1 if field == "seconds" else 100)
        panel.set(xlabel=said, xlim=(0, None), ylim=(0, 1.02))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("held-out reward of the agent")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=3, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.2, 1, 1))
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None})
