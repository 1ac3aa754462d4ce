"""Runs → a page of HTML that holds all it shows: no script, and nothing that it asks a network for.

Whatever models and users wrote is escaped, by Jinja or in a drawing, and the page's
policy forbids scripts besides.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ratchet.adapters.errors import counted
from ratchet.adapters.process.terminal import visible
from ratchet.adapters.project.modules import locate
from ratchet.adapters.redaction import redact
from ratchet.adapters.tinker.bases import find_decoder
from ratchet.tasks.examples.reading import ROW_READERS, kind_of
from ratchet.tasks.given.measures import HeldOutMeasure, describe_counts, read_counts
from ratchet.tasks.recording.transcripts import RecordedFailure, find_failures
from ratchet.tasks.recording.views import open_views
from ratchet.tasks.reports import plots
from ratchet.tasks.reports.facts import HeldOutScore, RunCurves, RunFacts, metric_names, read_facts
from ratchet.tasks.reports.rollouts import (
    BeforeAndAfter,
    MarkedRollout,
    find_before_and_after,
    read_marked_rollouts,
)
from ratchet.tasks.reports.tables import COST_COLUMNS, rows_by_purpose
from ratchet.tasks.spending.ledger import read_ledger
from ratchet.tasks.storage.dotted_keys import flatten
from ratchet.tasks.storage.files import is_file, is_written, read_bytes, write_text
from ratchet.tasks.storage.manifest import (
    Manifest,
    ancestors,
    checksum,
    differences,
    file_rows,
    generations,
    list_changes,
)
from ratchet.tasks.storage.plan_record import ArmOfRun, arms_of, child_runs, read_plan
from ratchet.tasks.storage.run_folder import RunFolder
from ratchet.tasks.storage.tables import query_beside

CALL_TIMES_QUERY = query_beside(__file__, "call_times")
MOST_CODE = 20_000
"""Bytes of a file of code that is shown."""
MOST_FAILURES = 20
"""Different errors of a run that its page shows: the latest."""
PAGE_VIEWS = ("spans", "calls", "rollouts")


def readable(value: object) -> str:
    """Write a value of a table; a number has separators of thousands, and None is a dash."""
    match value:
        case None:
            return "–"
        case float() if abs(value) >= 1000:
            return f"{value:,.0f}"
        case float():
            return f"{value:.4g}"
        case int() if not isinstance(value, bool):
            return f"{value:,}"
        case _:
            return str(value)


def read_code(run: RunFolder) -> dict[str, str]:
    """Return the texts of small files, not of data, that are as the run has had them last."""
    made = {name: sum for row in file_rows(run) for name, sum in row["files"].items()}
    places = {name: locate(Path(name)) for name in made}
    return {
        name: redact(read_bytes(place).decode(errors="replace"))
        for name, place in places.items()
        if is_file(place) and kind_of(place) not in ROW_READERS and checksum([place]) == made[name]
        if place.stat().st_size <= MOST_CODE
    }


HERE = Path(__file__).parent
TEMPLATES = Environment(
    loader=FileSystemLoader([HERE, HERE / "board"]),
    autoescape=True,
    undefined=StrictUndefined,
    finalize=lambda it: visible(it) if isinstance(it, str) and not isinstance(it, Markup) else it,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.globals.update(colours=plots.COLOURS, number=readable, list_changes=list_changes)
TEMPLATES.filters["counted"] = counted


@dataclass(frozen=True)
class ReportedRun:
    """Run with all that a page shows of it."""

    facts: RunFacts
    curves: RunCurves
    call_times: Sequence[Mapping[str, Any]]
    costs: Sequence[Sequence[object]]
    """Rows by COST_COLUMNS of all that the run has spent."""
    rollouts: Sequence[MarkedRollout]
    tokens_are_numbers: bool
    failures: Sequence[RecordedFailure]
    places: Sequence[Path]
    """Places of its rollouts that are kept."""
    examples: Sequence[BeforeAndAfter]
    measured: Sequence[HeldOutMeasure]
    """Measures on held-out texts or pairs, by checkpoint, of a run that learns them."""
    texts: Mapping[str, str]
    """Each split of a run of texts, and what was counted in it."""

    @property
    def plays(self) -> bool:
        """Whether the run learns from rollouts of an agent."""
        return "agent" in self.facts.recipe

    @property
    def lineage(self) -> list[Manifest]:
        """Parents of the run, the nearest first."""
        return [
            {**parent, "changed": differences(parent["recipe"], child["recipe"])}
            for child, parent in pairwise(generations(self.facts.manifest))
        ]

    def held_out(self, played: str) -> list[HeldOutScore]:
        """Return the first and the last score of a way of sampling; one if they are the same."""
        scores = [score for score in self.curves.scores if score.played == played]
        return [*scores[:1], *scores[1:][-1:]]

    @property
    def trained_on(self) -> list[float]:
        """Mean rewards of the first and the last step of training, if there are two."""
        rewards = [row["reward/mean"] for row in self.curves.metrics if "reward/mean" in row]
        return [rewards[0], rewards[-1]] if len(rewards) > 1 else []


def write_report(runs: Sequence[RunFolder], path: Path) -> Path:
    """Write the page of runs, which may have just begun; return its path.

    The page of stages or of a sweep shows their runs, with a table.
    """
    records = {run.name: read_plan(run) for run in runs}
    tables = [table for record in records.values() for table in record.tables()]
    shown = dict.fromkeys(one for run in runs for one in child_runs(run) or [run])
    chosen = {name for record in records.values() for name in record.chosen()}
    arms = arms_of(records if runs[1:] else {"": records[runs[0].name]})
    return write_text(path, render_report([*shown], chosen=chosen, arms=arms, tables=tables))


def render_report(
    runs: Sequence[RunFolder],
    frame: str = "layout.html",
    chosen: Collection[str] = (),
    arms: Mapping[str, ArmOfRun] | None = None,
    **framed: object,
) -> str:
    """Render the page of a run, or of several beside each other; `chosen` names the chosen runs.

    `arms` has the arm of each run of a sweep over seeds, and its sweep's arms.

    Another `frame` is a template around the page; `framed` are its values.
    """
    reported = [
        _read(run, run.name in chosen, (arms or {}).get(run.name, ("", ()))) for run in runs
    ]
    curves = [one.curves for one in reported]
    moving, constant = plots.split_constant(curves)
    ends = [(run.metrics[0], run.metrics[-1]) if run.metrics else ({}, {}) for run in curves]
    return TEMPLATES.get_template("page.html").render(
        {"tables": (), **framed},
        frame=frame,
        runs=reported,
        places=plots.colour_places(curves),
        rewards=[*plots.draw_rewards(curves), *plots.draw_named_rewards(curves)]
        if any(run.plays for run in reported)
        else plots.draw_panels(curves, plots.LEARNT),
        panels=plots.draw_panels(curves, moving),
        constant=constant,
        times=plots.draw_times(curves) if any(run.metrics for run in curves) else "",
        parts=plots.TIME_PARTS,
        recipes=compare_recipes([one.facts.recipe for one in reported]),
        metrics=[
            (name, [(first.get(name), last.get(name)) for first, last in ends])
            for name in metric_names(curves)
        ],
        cost_columns=COST_COLUMNS,
        code={name: text for run in runs for name, text in read_code(run).items()},
    )


def compare_recipes(recipes: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Any], bool]]:
    """List each key of recipes, its values, and whether they differ."""
    flat = [flatten(recipe) for recipe in recipes]
    keys = dict.fromkeys(key for recipe in flat for key in recipe)
    rows = [(key, [recipe.get(key) for recipe in flat]) for key in keys]
    return [(key, values, any(value != values[0] for value in values)) for key, values in rows]


def _read(run: RunFolder, chosen: bool, arm: ArmOfRun) -> ReportedRun:
    facts = read_facts(run)
    decode, done = find_decoder(facts.recipe["model"]["base"]), facts.done
    counts = read_counts(run.texts) if is_written(run.texts) else {}
    failing = [row["step"] for row in facts.metrics if row.get("rollouts/failed")]
    told = {*range(0, done, 1 + done // plots.MOST_POINTS), *failing[-MOST_FAILURES:]}
    with open_views([run], PAGE_VIEWS, lambda of: of.step in told or of.step >= done - 1) as views:
        call_times = views.sql(CALL_TIMES_QUERY, params={"ancestors": ancestors(run)})
        marked = [
            rollout
            for step in sorted({0, done - 1} if done else ())
            for rollout in read_marked_rollouts(run, step, views, decode)
        ]
        return ReportedRun(
            facts,
            replace(facts.curves(views), chosen=chosen, arm=arm[0], arms=arm[1]),
            call_times=call_times.to_arrow_table().to_pylist(),
            costs=[*rows_by_purpose(read_ledger(run))],
            rollouts=marked,
            tokens_are_numbers=decode is None,
            failures=find_failures(views)[:MOST_FAILURES],
            places=run.kept_places(),
            examples=find_before_and_after(views),
            measured=facts.measures(),
            texts={split: describe_counts(of_split) for split, of_split in counts.items()},
        )
