"""Runs → a page of HTML that holds all it shows: no script, and nothing that it asks a network for.

Whatever models and users wrote is escaped by Jinja, or by matplotlib in a drawing, and the page's
policy forbids scripts besides.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from adapters.tinker.token_texts import find_token_texts
from tasks.recording.views import open_views
from tasks.reports import plots
from tasks.reports.curves import HeldOutScore, RunCurves, metric_names, read_curves
from tasks.reports.failures import RecordedFailure, find_failures
from tasks.reports.marked_rollouts import MarkedRollout, read_marked_rollouts
from tasks.storage.files import write_text
from tasks.storage.keys import flatten
from tasks.storage.manifest import Manifest, differences, read_manifest
from tasks.storage.run_folder import RunFolder
from tasks.storage.tables import query_beside

SPENDING = query_beside(str(Path(__file__).with_name("spending")))
MOST_FAILURES = 20
"""Different errors of a run that its page shows, the latest ones."""
READ = ("spans", "calls", "rollouts", "evaluations")


@dataclass(frozen=True)
class ReportedRun:
    """Run with all that a page shows of it."""

    folder: RunFolder
    manifest: Manifest
    curves: RunCurves
    spending: Sequence[Mapping[str, Any]]
    rollouts: Sequence[MarkedRollout]
    tokens_are_numbers: bool
    failures: Sequence[RecordedFailure]

    @property
    def lineage(self) -> list[Manifest]:
        """Parents of the run, the nearest first."""
        parents, described = [], self.manifest
        while parent := described.get("parent"):
            changed = differences(parent["recipe"], described["recipe"])
            parents.append({**parent, "changed": changed})
            described = parent
        return parents

    def held_out(self, played: str) -> list[HeldOutScore]:
        """Return the first and the last score of a way of sampling; one of them if it is one."""
        scores = [score for score in self.curves.scores if score.played == played]
        return [*scores[:1], *scores[1:][-1:]]


def write_report(runs: Sequence[RunFolder], path: Path) -> Path:
    """Write the page of runs, which may have just begun; return its path."""
    return write_text(path, render_report(runs))


def render_report(runs: Sequence[RunFolder]) -> str:
    reported = [_read(run) for run in runs]
    curves = [one.curves for one in reported]
    page = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template("page.html")
    return page.render(
        runs=reported,
        rewards=[*plots.draw_rewards(curves), *plots.draw_role_rewards(curves)],
        panels=plots.draw_panels(curves),
        times=plots.draw_times(curves) if any(run.metrics for run in curves) else "",
        parts=plots.PARTS,
        colours=plots.COLOURS,
        recipes=compare_recipes([one.manifest["recipe"] for one in reported]),
        metrics=_all_metrics(curves),
    )


def compare_recipes(recipes: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Any], bool]]:
    """List each key of recipes, its values, and whether they differ."""
    flat = [flatten(recipe) for recipe in recipes]
    keys = dict.fromkeys(key for recipe in flat for key in recipe)
    rows = [(key, [recipe.get(key) for recipe in flat]) for key in keys]
    return [(key, values, any(value != values[0] for value in values)) for key, values in rows]


def _read(run: RunFolder) -> ReportedRun:
    manifest = read_manifest(run)
    text_of = find_token_texts(manifest["recipe"]["model"]["base"])
    with open_views([run], READ) as views:
        curves = read_curves(run, views)
        done = len(curves.metrics)
        marked = [
            rollout
            for step in sorted({0, done - 1} if done else ())
            for rollout in read_marked_rollouts(run, step, views, text_of)
        ]
        failures = find_failures(views)[:MOST_FAILURES]
        spending = views.sql(SPENDING).to_arrow_table().to_pylist()
        return ReportedRun(run, manifest, curves, spending, marked, text_of is None, failures)


def _all_metrics(runs: Sequence[RunCurves]) -> list[tuple[str, list[tuple[Any, Any]]]]:
    """List each metric with its value in the first and in the last step of each run."""
    ends = [(run.metrics[0], run.metrics[-1]) if run.metrics else ({}, {}) for run in runs]
    return [
        (name, [(first.get(name), last.get(name)) for first, last in ends])
        for name in metric_names(runs)
    ]
