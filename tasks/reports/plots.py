"""Curves of runs drawn by matplotlib, as SVG elements that take their colours from the page.

The page needs no script: matplotlib writes each colour as a number, and the number is replaced by
a variable of the page's style, which has one value for a light and one for a dark background.
"""

import io
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from math import ceil, floor, log10
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ratchet.adapters.rewards import MEASURE
from ratchet.tasks.reports.facts import RunCurves, StepMetrics, metric_names
from ratchet.tasks.storage.files import read_bytes

SIZE = 4.2, 2.5
"""Width and height of a panel, in inches."""
LEFT, RIGHT, ABOVE, BELOW = 0.75, 0.3, 0.3, 0.3
"""Margins of a panel, in inches: eight letters stand left of its axis, and half of seven beyond it.

Measuring the texts would take as long as drawing them.
"""
DIGITS = 3
"""Significant digits: a metric's curve is constant if its values are equal in them."""
COLOURS = 8
"""Runs that have a colour of their own."""
LEVEL = 0.02
"""Least change of a metric, as a share of its size, that its panel shows as a change."""
TICKS = [1, 2, 2.5, 5, 10]
"""Multiples that the numbers of an axis may be of."""
INK, RULE = "#00fe00", "#00fe01"
SERIES = [f"#00fd0{number}" for number in range(COLOURS)]
VARIABLES = {INK: "currentColor", RULE: "var(--rule)"} | {
    colour: f"var(--series-{number})" for number, colour in enumerate(SERIES)
}
"""Colour in a drawing → what the page has in its place."""

PALETTE = read_bytes(Path(__file__).with_name("colours.css")).decode()
"""Style with the values of those variables."""

DASHES = ("-", "--", ":", "-.")
"""Line of each policy of a run."""
WIDTHS = {False: 1.4, True: 3.0}
"""Whether a sweep has chosen a run → the width of its lines."""
MARKERS = {"sampled": "full", "greedy": "none"}
"""Way of sampling → fill of its points."""
TIME_PARTS = ("sampling", "training", "rest")
"""Parts of a run's time, each in a colour."""

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "ratchet",
    "text.parse_math": False,
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titley": 1.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "lines.markersize": 3,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    "axes.edgecolor": RULE,
}
MOST_POINTS = 200
METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))


@dataclass(frozen=True)
class Panel:
    """Panel of a metric by step, or of its ratio to another one."""

    title: str
    metric: str
    over: str | None = None
    logarithmic: bool = False

    def values(self, rows: Sequence[StepMetrics]) -> dict[int, float]:
        return {
            step: row[self.metric] / divisor
            for step, row in enumerate(rows)
            if self.metric in row and (divisor := row.get(self.over) if self.over else 1.0)
        }


REWARDS = Panel("reward of a step's rollouts", "reward/mean")
LEARNT = (
    Panel("loss of a step", "loss"),
    Panel("held-out loss", "test/loss"),
    Panel("share of a step's pairs whose chosen side is preferred", "accuracy"),
    Panel("held-out accuracy", "test/accuracy"),
)
"""Panels of runs that learn texts, in nats a token, or pairs."""
PANELS = (
    Panel("entropy of the sampling policy, in nats", "entropy"),
    Panel("KL, sampling to training policy (v2)", "kl_sample_train_v2", logarithmic=True),
    Panel("KL, policy to reference (v1)", "kl_reference_v1"),
    Panel("KL, policy to teachers, in nats a token", "teacher/kl"),
    Panel("effective sample size, share", "ess"),
    Panel("lag of sampling, in updates", "lag"),
    Panel("tokens of an answer", "tokens/sampled", over="calls"),
    Panel("tokens of a prompt", "tokens/prompt", over="calls"),
    Panel("share of uniform groups", "groups/uniform_fraction"),
    Panel("trained share of the sampled tokens", "tokens/trained", over="tokens/sampled"),
    Panel("failed rollouts", "rollouts/failed"),
    Panel("turns whose tokens were not kept", "turns/not_kept"),
    Panel("seconds of a step's sampling", "seconds/sampling"),
    Panel("seconds of a step's training", "seconds/training"),
)


SCALES: Mapping[str, Callable[[RunCurves], Sequence[float]]] = {
    "updates made": lambda run: range(len(run.metrics) + 1),
    "minutes": lambda run: run.minutes,
    "sampled tokens": lambda run: run.tokens,
}
"""Scale over which rewards are drawn → its value at each checkpoint."""


def draw_rewards(runs: Sequence[RunCurves], scales: Iterable[str] = SCALES) -> list[str]:
    """Draw the rewards of runs over some of SCALES."""
    return [_draw_reward(runs, label) for label in scales]


def draw_named_rewards(runs: Sequence[RunCurves]) -> list[str]:
    """Draw the mean reward of each role, if the agent names several, and what it measures."""
    own = (name for run in runs for name in run.measures)
    names = dict.fromkeys([*own, *metric_names(runs)])
    roles = [name for name in names if re.fullmatch(r"reward/[^/]*/[^/]*", name)]
    panels = [Panel(f"reward of the role {name.split('/')[1]}", name) for name in roles]
    measured = [
        Panel(f"{name.removeprefix(MEASURE)}, as the agent measures it", name)
        for name in names
        if name.startswith(MEASURE)
    ]
    return draw_panels(runs, [*panels, *measured] if panels[1:] else measured)


def draw_panels(runs: Sequence[RunCurves], panels: Sequence[Panel] = PANELS) -> list[str]:
    """Draw the panels that some run has a value for; policies differ in their dashes."""
    return [drawn for panel in panels if (drawn := _draw_panel(runs, panel))]


def split_constant(runs: Sequence[RunCurves]) -> tuple[list[Panel], str]:
    """Return the panels with a curve that is not constant, and a sentence on the constant ones."""
    moving: list[Panel] = []
    constant: list[str] = []
    for panel in PANELS:
        curves = [[*map(fmean, values.values())] for *_, values in _series(runs, panel)]
        if any(len({f"{value:.{DIGITS}g}" for value in curve}) > 1 for curve in curves):
            moving.append(panel)
        elif curves:
            values = dict.fromkeys(_short(curve[0]) for curve in curves)
            constant.append(f"{panel.title}: {' and '.join(values)}")
    said = f"Constant, and so without a curve: {'; '.join(constant)}." if constant else ""
    return moving, said


def draw_times(runs: Sequence[RunCurves]) -> str:
    """Draw the minutes of each run in TIME_PARTS, each with its colour; several runs have names."""
    height = 0.6 + 0.45 * len(runs)
    with _panel("minutes", (2 * SIZE[0], height)) as (axes, svg):
        for place, run in enumerate(runs):
            begun = 0.0
            for colour, minutes in zip(SERIES, _time_parts(run), strict=False):
                axes.barh(place, minutes, left=begun, color=colour, height=0.4)
                begun += minutes
            if len(runs) > 1:
                axes.text(0, place - 0.28, run.name)
        axes.set_axisbelow(True)
        axes.set_yticks([])
        axes.set_ylim(len(runs) - 0.6, -0.7)
        axes.grid(visible=False, axis="y")
        return svg()


def join_drawings(drawings: Sequence[str], columns: int = 2) -> str:
    """Join panels into one SVG file, in rows, with the colours that each has on the page."""
    width, height = (96 * inches for inches in SIZE)  # in pixels
    wide, high = width * min(columns, len(drawings)), height * ceil(len(drawings) / columns)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}">',
        f"<style>{PALETTE}:root {{ color: var(--ink); }}</style>",
        '<rect width="100%" height="100%" fill="var(--paper)"/>',
    ]
    for at, drawing in enumerate(drawings):
        corner = f'<svg x="{at % columns * width}" y="{at // columns * height}"'
        lines.append(drawing.replace("<svg", corner, 1))
    return "\n".join([*lines, "</svg>"])


def _time_parts(run: RunCurves) -> list[float]:
    """Return the minutes of each of TIME_PARTS.

    The rest is what the clock shows beyond the other two: evaluations, saving and waiting. Where
    steps overlap, sampling and training may come to more than the clock, and nothing is left.
    """
    sums = [
        sum(row[key] for row in run.metrics for key in row if key.endswith(f"seconds/{part}")) / 60
        for part in TIME_PARTS[:2]
    ]
    return [*sums, max(0.0, run.minutes[-1] - sum(sums))]


def _draw_reward(runs: Sequence[RunCurves], label: str) -> str:
    with _panel(f"reward, by {label}") as (axes, svg):
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=TICKS, integer="updates" in label))
        for colour, width, own in _arms(runs):
            places = _join(dict(enumerate(SCALES[label](run))) for run in own)
            rewards = _join(REWARDS.values(run.metrics) for run in own)
            steps = _spread([step for step in rewards if step in places])
            along = [fmean(places[step]) for step in steps]
            style = {"color": colour, "linewidth": width, "marker": "."}
            _draw_line(axes, along, [rewards[step] for step in steps], style)
            for score in _spread([s for run in own for s in run.scores if s.step in places]):
                axes.errorbar(
                    fmean(places[score.step]),
                    score.reward,
                    [[abs(score.reward - bound)] for bound in score.interval or ()] or None,
                    color=colour,
                    marker="o",
                    markersize=5,
                    elinewidth=0.9,
                    capsize=2,
                    fillstyle=MARKERS.get(score.played, "bottom"),
                )
        return svg()


def _draw_panel(runs: Sequence[RunCurves], panel: Panel) -> str | None:
    series = _series(runs, panel)
    measured = [
        (colour, _join(run.measures.get(panel.metric, {}) for run in own))
        for colour, _, own in _arms(runs)
    ]
    drawn = [of_step for *_, values in (*series, *measured) for of_step in values.values()]
    found = [value for of_step in drawn for value in of_step]
    if not any(found):
        return None
    with _panel(panel.title) as (axes, svg):
        for colour, width, dashes, values in series:
            style = {"color": colour, "linewidth": width, "linestyle": dashes, "marker": "."}
            steps = _spread([*values])
            _draw_line(axes, steps, [values[step] for step in steps], style)
        for colour, values in measured:
            axes.plot([*values], [*map(fmean, values.values())], "o", color=colour, markersize=5)
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=TICKS, integer=True))
        if panel.logarithmic and min(found) > 0:
            axes.set_yscale("log")
            axes.set_ylim(10 ** floor(log10(min(found))), 10 ** ceil(log10(max(found))))
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}")
            axes.minorticks_off()
        elif max(found) - min(found) < LEVEL * max(map(abs, found)):
            axes.set_ylim(min(found) * (1 - LEVEL), max(found) * (1 + LEVEL))
        return svg()


def _spread(values: Sequence[Any]) -> list[Any]:
    """Return the values that are drawn: evenly spread over a long run, and the last."""
    return [*values[: -1 : 1 + len(values) // MOST_POINTS], *values[-1:]]


def colour_places(runs: Sequence[RunCurves]) -> list[int]:
    """Return the number of each run's colour, which the runs of an arm share."""
    places: dict[str, int] = {}
    return [places.setdefault(run.arm or run.name, len(places)) for run in runs]


def _arms(runs: Sequence[RunCurves]) -> Iterator[tuple[str, float, list[RunCurves]]]:
    """Yield the colour, the width and the runs of each line; a run of no arm has its own."""
    of_line = defaultdict[int, list[RunCurves]](list)
    for place, run in zip(colour_places(runs), runs, strict=True):
        of_line[place].append(run)
    for place, own in of_line.items():
        yield SERIES[place % COLOURS], WIDTHS[any(run.chosen for run in own)], own


def _series(
    runs: Sequence[RunCurves], panel: Panel
) -> list[tuple[str, float, str, dict[int, list[float]]]]:
    """Return the line and the values by step of each policy that has any."""
    return [
        (colour, width, dashes, values)
        for colour, width, own in _arms(runs)
        for dashes, policy in zip(cycle(DASHES), own[0].policies, strict=False)
        if (values := _join(panel.values(run.of_policy(policy)) for run in own))
    ]


def _join(runs: Iterable[Mapping[int, float]]) -> dict[int, list[float]]:
    """Return the values of all runs at each step."""
    joined = defaultdict[int, list[float]](list)
    for values in runs:
        for step, value in values.items():
            joined[step].append(value)
    return dict(sorted(joined.items()))


def _draw_line(
    axes: Axes, places: Sequence[float], values: Sequence[Sequence[float]], style: dict[str, Any]
) -> None:
    """Draw the means of an arm's runs, with a band from the lowest to the highest of several."""
    axes.plot(places, [*map(fmean, values)], **style)
    if any(len(of_step) > 1 for of_step in values):
        bounds = [*map(min, values)], [*map(max, values)]
        axes.fill_between(places, *bounds, color=style["color"], alpha=0.18, lw=0)


@contextmanager
def _panel(
    title: str, size: tuple[float, float] = SIZE
) -> Iterator[tuple[Axes, Callable[[], str]]]:
    with mpl.rc_context(STYLE):
        figure, (wide, high) = Figure(size), size
        inner = (wide - LEFT - RIGHT) / wide, (high - ABOVE - BELOW) / high
        axes = figure.add_axes((LEFT / wide, BELOW / high, *inner), title=title)
        axes.margins(y=0.08)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(6, steps=TICKS))
            axis.set_major_formatter(_short)
        yield axes, partial(_write, figure)


def _write(figure: Figure) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata=METADATA)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    for number, variable in VARIABLES.items():
        text = text.replace(number, variable)
    return text


def _short(value: float, _: object = None) -> str:
    """Write a number on an axis, with separators of thousands."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:,.4g}M"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
