"""Curves of runs as SVG elements that take their colours from the page, and need no script.

A colour is a variable of the page's style, which has one value for a light and one for a dark
background.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle, pairwise
from math import ceil, floor, isfinite, log10
from pathlib import Path
from statistics import fmean
from typing import Any

from markupsafe import escape

from ratchet.adapters.rewards import MEASURE
from ratchet.tasks.reports.facts import HeldOutScore, RunCurves, StepMetrics, metric_names
from ratchet.tasks.storage.files import read_bytes

SIZE = 302.4, 180.0
"""Width and height of a panel, in points."""
LEFT, RIGHT, ABOVE, BELOW = 54.0, 21.6, 21.6, 21.6
"""Margins of a panel: eight letters stand left of its axis, and half of seven beyond it."""
FREE = 0.05, 0.08
"""Shares of the range of what is drawn that stay free at both ends of each axis."""
DIGITS = 3
"""Significant digits: a metric's curve is constant if its values are equal in them."""
COLOURS = 8
"""Runs that have a colour of their own."""
SERIES = [f"var(--series-{number})" for number in range(COLOURS)]
Point = tuple[float, float]
Shape = tuple[Sequence[Point], str, str]
"""Points in the units of the axes; the style of a line through them, or of a mark at each; the
mark."""

LEVEL = 0.02
"""Least change of a metric, as a share of its size, that its panel shows as a change."""
MOST_TICKS, TICKS = 6, (1, 2, 2.5, 5, 10)
"""Parts into which the numbers of an axis divide it, at most, and multiples that they may be of."""

PALETTE = read_bytes(Path(__file__).with_name("colours.css")).decode()
"""Style with the values of the variables."""

DASHES = ("none", "5 3", "1 3", "6 3 1 3")
"""Line of each policy of a run."""
WIDTHS = {False: 1.4, True: 3.0}
"""Whether a sweep has chosen a run → the width of its lines."""
RING, HALF = "m-2.5,0a2.5,2.5 0 1 0 5,0a2.5,2.5 0 1 0-5,0", "m-2.5,0a2.5,2.5 0 0 0 5,0z"
CAP = "m-2,0h4"
"""Marks around a point, as paths of SVG."""
FILLED = {"sampled": RING, "greedy": ""}
"""Way of sampling → the filled part of its points; half of others."""
TIME_PARTS = ("sampling", "training", "rest")
"""Parts of a run's time, each in a colour."""
MOST_POINTS = 200
RULES = "fill: none; stroke: var(--rule); stroke-width: 0.6"
"""Style of the axes, and of the lines at their numbers."""


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
    paths: list[Shape] = []
    for place, run in enumerate(runs):
        ends = [0.0, *accumulate(_time_parts(run))]
        for colour, (begun, ended) in zip(SERIES, pairwise(ends), strict=False):
            bar = [(begun, place), (ended, place)] if begun < ended else []
            paths.append(_line(bar, stroke=colour, stroke_width=12))
    names = [run.name if len(runs) > 1 else "" for run in runs]
    return _draw("minutes", paths, (len(runs) - 0.6, -0.7), names=names)


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
    paths: list[Shape] = []
    for colour, width, own in _arms(runs):
        places = _join(dict(enumerate(SCALES[label](run))) for run in own)
        means = _join(REWARDS.values(run.metrics) for run in own)
        steps = _spread([step for step in means if step in places])
        along = [fmean(places[step]) for step in steps]
        paths += _lines(along, [means[step] for step in steps], colour, stroke_width=width)
        scores = defaultdict[tuple[int, str], list[HeldOutScore]](list)
        for score in (one for run in own for one in run.scores if one.step in places):
            scores[score.step, score.played].append(score)
        for (step, played), of in _spread([*scores.items()]):
            rewards = [score.reward for score in of]
            at = fmean(places[step]), fmean(rewards)
            ends = of[0].interval or () if len(own) == 1 else (min(rewards), max(rewards))
            bounds = [(at[0], bound) for bound in ends]
            paths += [_line(bounds, mark, stroke=colour, stroke_width=0.9) for mark in ("", CAP)]
            paths.append(_line([at], RING, stroke=colour))
            paths.append(_line([at], FILLED.get(played, HALF), fill=colour))
    return _draw(f"reward, by {label}", paths, whole="updates" in label)


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
    paths: list[Shape] = []
    for colour, width, dashes, values in series:
        steps = _spread([*values])
        style = {"stroke_width": width, "stroke_dasharray": dashes}
        paths += _lines(steps, [values[step] for step in steps], colour, **style)
    for colour, values in measured:
        means = [(step, fmean(of_step)) for step, of_step in values.items()]
        paths.append(_line(means, RING, fill=colour))
    least, most, limits = min(found), max(found), None
    logarithmic = panel.logarithmic and least > 0
    if logarithmic:
        limits = 10.0 ** floor(log10(least)), 10.0 ** floor(log10(most) + 1)
    elif most - least < LEVEL * max(map(abs, found)):
        limits = least - LEVEL * abs(least), most + LEVEL * abs(most)
    return _draw(panel.title, paths, limits, whole=True, logarithmic=logarithmic)


def _spread(values: Sequence[Any]) -> list[Any]:
    """Return the values that are drawn: evenly spread over a long run, and the last."""
    return [*values[: -1 : 1 + len(values) // MOST_POINTS], *values[-1:]]


def colour_places(runs: Sequence[RunCurves]) -> list[int]:
    """Return the number of each run's colour, which the runs of an arm share."""
    lines = dict.fromkeys(line for run in runs for line in run.arms or [run.name])
    places = {line: place for place, line in enumerate(lines)}
    return [places[run.line] for run in runs]


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


def _lines(
    along: Sequence[float], values: Sequence[Sequence[float]], colour: str, **style: str | float
) -> Iterator[Shape]:
    """Yield the means of an arm's runs, and a band from the lowest to the highest of several."""
    means = zip(along, map(fmean, values), strict=True)
    yield _line(means, stroke=colour, stroke_linecap="round", **style)
    if any(len(of_step) > 1 for of_step in values):
        low, high = ([*zip(along, map(end, values), strict=True)] for end in (min, max))
        yield _line([*low, *reversed(high)], fill=colour, opacity=0.18)


def _line(points: Iterable[Point], mark: str = "", /, **style: object) -> Shape:
    """Return a line through those of some points that are numbers, or a mark at each of them."""
    said = "; ".join(f"{name.replace('_', '-')}: {value}" for name, value in style.items())
    known = [point for point in points if all(map(isfinite, point))]
    return known, said if "fill" in style else f"fill: none; {said}", mark


def _draw(
    title: str,
    paths: Iterable[Shape],
    limits: Point | None = None,
    *,
    whole: bool = False,
    logarithmic: bool = False,
    names: Sequence[str] = (),
) -> str:
    """Draw paths over two axes; the left one has the `limits`, and the lower one `whole` numbers.

    With `names` of rows, which are the places 0 and on, the drawing is as high as they need.
    """
    wide, high = (2 * SIZE[0], 43.2 + 32.4 * len(names)) if names else SIZE
    paths = [path for path in paths if path[0]]
    drawn = [point for points, *_ in paths for point in points] or [(0.0, 0.0), (1.0, 1.0)]
    across, up = zip(*drawn, strict=True)
    ends, limits = _widen(across, FREE[0]), limits or _widen(up, FREE[1])
    x = _scale(ends, (LEFT, wide - RIGHT))
    y = _scale(limits, (high - BELOW, ABOVE), logarithmic=logarithmic)
    below = _ticks(ends, whole=whole)
    beside = [] if names else _powers(limits) if logarithmic else _ticks(limits)
    rules = [f"M{x(at):.1f},{high - BELOW}V{ABOVE}" for at in (ends[0], *below)]
    rules += [f"M{LEFT},{y(at):.1f}H{wide - RIGHT}" for at in (limits[0], *beside)]
    lines = [f'<path d="{"".join(rules)}" style="{RULES}"/>']
    for points, style, mark in paths:
        at = [f"{x(one):.1f},{y(other):.1f}" for one, other in points]
        path = f"M{(mark + 'M' if mark else ' ').join(at)}{mark or 'h0'}"
        lines.append(f'<path d="{path}" style="{style}"/>')
    write = "{:.0e}".format if logarithmic else _short
    texts = [((LEFT + wide - RIGHT) / 2, ABOVE - 7, "middle", title)]
    texts += [(x(at), high - BELOW + 12, "middle", _short(at)) for at in below]
    texts += [(LEFT - 4, y(at) + 3, "end", write(at)) for at in beside]
    texts += [(x(0), y(place - 0.28), "start", name) for place, name in enumerate(names)]
    for one, at, anchor, said in texts:
        style = f"fill: currentColor; text-anchor: {anchor}"
        lines.append(f'<text x="{one:.1f}" y="{at:.1f}" style="{style}">{escape(said)}</text>')
    size = f'width="{wide}pt" height="{high}pt" viewBox="0 0 {wide} {high}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} style="font: 9px system-ui, sans-serif">'
    )
    return "\n".join([head, *lines, "</svg>"])


def _widen(values: Sequence[float], share: float) -> Point:
    """Return the ends of an axis with these values, of which a share of their range stays free."""
    low, high = min(values), max(values)
    free = share * (high - low) or 0.05 * abs(low) or 0.05
    return low - free, high + free


def _scale(values: Point, places: Point, *, logarithmic: bool = False) -> Callable[[float], float]:
    """Return the place of a value on an axis, by the values and the places of its ends."""
    unit = log10 if logarithmic else float
    low, high = map(unit, values)
    return lambda at: places[0] + (unit(at) - low) / (high - low) * (places[1] - places[0])


def _ticks(ends: Point, *, whole: bool = False) -> list[float]:
    """Return the values of an axis that have a number."""
    least = max((ends[1] - ends[0]) / MOST_TICKS * (1 - 1e-9), 1.0 if whole else 0.0)
    steps = [10.0 ** floor(log10(least)) * multiple for multiple in TICKS]
    step = next(one for one in steps if one >= least and not (whole and one % 1))
    return [step * at for at in range(ceil(ends[0] / step), floor(ends[1] / step) + 1)]


def _powers(ends: Point) -> list[float]:
    """Return the values of a logarithmic axis that have a number."""
    powers = range(round(log10(ends[0])), round(log10(ends[1])) + 1)
    return [10.0**power for power in powers[:: 1 + len(powers) // (MOST_TICKS + 2)]]


def _short(value: float) -> str:
    """Write a number on an axis, with separators of thousands."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:,.4g}M"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
