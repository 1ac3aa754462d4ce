"""Pages of the board: a table of runs and, of each, its report, rollouts, groups and examples."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import lru_cache
from operator import itemgetter
from typing import Literal

from pydantic import ConfigDict, Field

from ratchet.adapters.tinker.bases import find_decoder
from ratchet.tasks.reports.board.runs import (
    find_differences,
    last_reward,
    read_row,
    read_runs,
    show,
)
from ratchet.tasks.reports.board.searches import (
    PAGE_ROWS,
    ExampleSearch,
    FromQuery,
    GroupSearch,
    RolloutSearch,
    Sides,
    ViewRow,
    choose_checkpoints,
    compare_examples,
    list_splits,
    played_examples,
    read_group,
    search_groups,
    search_rollouts,
)
from ratchet.tasks.reports.facts import BROKEN, RunCurves, RunFacts, metric_names
from ratchet.tasks.reports.page import TEMPLATES, render_report
from ratchet.tasks.reports.plots import COLOURS, Panel, colour_places, draw_panels, draw_rewards
from ratchet.tasks.reports.progress import ProgressReader
from ratchet.tasks.storage.files import FileVersions, version_of
from ratchet.tasks.storage.manifest import recipe_of
from ratchet.tasks.storage.plan_record import ArmOfRun, PlanRecord, all_plans, arms_of, read_plan
from ratchet.tasks.storage.run_folder import RunFolder, folder_of, runs_root

REFRESH_SECONDS = 5
"""Time after which a page of a run that trains is loaded again."""
MOST_DIFFERENCES = 6
"""Keys of a recipe that the table shows."""
MOST_TRAJECTORIES = 20
"""Trajectories of a rollout that are shown."""
MOST_REPORTS = 16
"""Reports that are kept in memory."""


class RunSelection(FromQuery):
    """Selection of runs, and of what is drawn of them.

    `runs` is a name in which a * stands for any letters: `sweep-*` names the runs of a sweep. `key`
    is `key=value`, or a key whose value differs from most runs of the agent. Without a `run`, the
    first runs of the page are drawn.
    """

    runs: str | None = Field(default=None, max_length=300)
    agent: str | None = Field(default=None, max_length=300)
    key: str | None = Field(default=None, max_length=1000)
    sort: Literal["newest", "reward", "name"] = "newest"
    metric: str | None = Field(default=None, max_length=300)
    run: list[str] = Field(default=[], max_length=COLOURS)

    def fits(self, run: RunFacts, differences: Sequence[tuple[str, str]]) -> bool:
        if self.runs is not None and not fnmatchcase(run.name, self.runs):
            return False
        keys = {} if run.trouble else run.keys
        if self.agent is not None and (run.trouble or run.agent != self.agent):
            return False
        key, has_value, value = (self.key or "").partition("=")
        if has_value:
            return key.strip() in keys and show(keys[key.strip()]) == value.strip()
        return not key or key.strip() in dict(differences)


class Compared(FromQuery):
    """Runs whose report is asked for; further fields come from the form of the table."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    run: list[str] = Field(min_length=1, max_length=COLOURS)


def render_board(query: RunSelection) -> str:
    """Render the table of runs, with their curves over each other."""
    runs = read_runs()
    differences = find_differences(runs)
    chosen = [run for run in runs if query.fits(run, differences[run.name])]
    if query.sort == "name":
        chosen.sort(key=lambda run: run.name)
    if query.sort == "reward":
        chosen.sort(key=last_reward, reverse=True)
    shown = chosen[query.skipped : query.skipped + PAGE_ROWS]
    ticked = [run for run in chosen if run.name in query.run]
    rows, ticked_rows = (
        [read_row(run, run.run.is_held(), differences[run.name], _look) for run in some]
        for some in (shown, ticked)
    )
    known = [row.facts for row in ticked_rows or rows if not row.trouble and row.facts.done]
    plans = _read_plans()
    arms, best = arms_of(plans), {name for of in plans.values() for name in of.chosen()}
    every = [_of_arm(facts, arms, best) for facts in known if facts.is_named]
    drawn = [(one, at) for one, at in zip(every, colour_places(every), strict=True) if at < COLOURS]
    curves, places = [one for one, _ in drawn], {one.name: at for one, at in drawn}
    lines = dict(sorted(((one.line, at) for one, at in drawn), key=itemgetter(1)))
    names = metric_names(curves)
    panels = [Panel(name, name) for name in names if name == query.metric]
    drawings = [
        *draw_rewards(curves, ["updates made", "sampled tokens"]),
        *draw_panels(curves, panels),
    ]
    return _render(
        "board.html",
        query,
        is_running=any(row.state == "running" for row in rows),
        root=str(runs_root()),
        agents=sorted({run.agent for run in runs if not run.trouble}),
        keys=sorted({key for differing in differences.values() for key, _ in differing}),
        metrics=sorted(names),
        drawings=drawings if curves else [],
        drawn=places,
        lines=lines,
        arms=[
            (name, *of.tables()[0], [lines.get(f"{name}, {arm.name}") for arm in of.arms])
            for name, of in plans.items()
            if places.keys() & {*of.runs}
        ],
        elsewhere=[run.name for run in ticked if run not in shown],
        rows=rows,
        found=len(chosen),
        most_differences=MOST_DIFFERENCES,
    )


def _read_plans() -> dict[str, PlanRecord]:
    """Read the sweeps that have arms, by their names."""
    plans: dict[str, PlanRecord] = {}
    for run in all_plans():
        with suppress(*BROKEN):  # its own page says why it cannot be read
            plans[run.name] = read_plan(run)
    return {name: record for name, record in plans.items() if record.arms}


def _of_arm(facts: RunFacts, arms: Mapping[str, ArmOfRun], chosen: Collection[str]) -> RunCurves:
    arm, all_arms = arms.get(facts.name, ("", ()))
    return replace(facts.curves(), arm=arm, arms=all_arms, chosen=facts.name in chosen)


def render_run(name: str, query: FromQuery) -> str:
    """Render the report of a run as it is now, with links to its other pages."""
    run = folder_of(name)
    folders = [path.parent for path in (run.evaluation("_"), run.spans("_"), run.journal("_"))]
    version = version_of([run.manifest, run.metrics, run.owners, *folders])
    return _render_report(run, version, query.live, _refresh(query, run.is_held()))


def render_comparison(query: Compared) -> str:
    """Render the report of several runs."""
    runs, arms = [folder_of(name) for name in query.run], arms_of(_read_plans())
    refresh = _refresh(query, any(run.is_held() for run in runs))
    framed = {"query": query, "refresh": refresh, "run_name": "", "here": ""}
    return render_report(runs, "frame.html", arms=arms, **framed)


def render_rollouts(name: str, query: RolloutSearch) -> str:
    """Render a page of the rollouts of a run that fit a search."""
    run = _bound(name)
    rows, splits = search_rollouts(run, query), list_splits(run)
    return _render_of_run(run, "rollouts", query, rows=rows, found=_found(rows), splits=splits)


def render_groups(name: str, query: GroupSearch) -> str:
    """Render a page of the groups of a run that fit a search."""
    run = _bound(name)
    rows, splits = search_groups(run, query), list_splits(run)
    return _render_of_run(run, "groups", query, rows=rows, found=_found(rows), splits=splits)


def render_group(name: str, group: str, query: Sides) -> str:
    """Render two rollouts of a group beside each other, with the trained tokens marked."""
    run = _bound(name)
    decode = find_decoder(recipe_of(run)["model"]["base"])
    rows, shown = read_group(run, group, query, decode)
    return _render_of_run(
        run,
        "group",
        query,
        group=group,
        rows=rows,
        shown=shown,
        tokens_are_numbers=decode is None,
        has_policies=len(run.policies()) > 1,
        most_trajectories=MOST_TRAJECTORIES,
    )


def render_examples(name: str, query: ExampleSearch) -> str:
    """Render the held-out examples of a run, before and after."""
    run = _bound(name)
    played = played_examples(run)
    search = choose_checkpoints(query, played) if played else query
    rows = compare_examples(run, search) if played else []
    return _render_of_run(run, "examples", search, rows=rows, found=_found(rows), played=played)


def render_refusal(title: str, said: str) -> str:
    """Render why a page is not shown."""
    return TEMPLATES.get_template("refusal.html").render(title=title, said=said)


@lru_cache(MOST_REPORTS)
def _render_report(
    run: RunFolder, _: FileVersions, live: Literal["on", "off"], refresh: int | None
) -> str:
    query = FromQuery(live=live)
    return render_report(
        [run], "frame.html", query=query, refresh=refresh, run_name=run.name, here="report"
    )


def _bound(name: str) -> RunFolder:
    """Return the folder of a run; RunError if there is no run, or if its format is another."""
    run = folder_of(name)
    recipe_of(run)
    return run


def _look(run: RunFolder) -> str:
    """Say what a run does."""
    return str(ProgressReader(run).look())


def _render_of_run(run: RunFolder, page: str, query: FromQuery, **shown: object) -> str:
    is_running = run.is_held()
    names = {"run_name": run.name, "here": "held-out examples" if page == "examples" else page}
    return _render(f"{page}_page.html", query, is_running=is_running, **names, **shown)


def _render(template: str, query: FromQuery, is_running: bool, **shown: object) -> str:
    framed = {"run_name": "", "here": "", "size": PAGE_ROWS, "refresh": _refresh(query, is_running)}
    return TEMPLATES.get_template(template).render(framed, query=query, **shown)


def _refresh(query: FromQuery, is_running: bool) -> int | None:
    return REFRESH_SECONDS if is_running and query.live == "on" else None


def _found(rows: Sequence[ViewRow]) -> int:
    return rows[0]["found"] if rows else 0
