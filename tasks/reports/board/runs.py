"""A folder of runs → the rows of the board's table, and the table of `ratchet runs`."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version

from ratchet.adapters.errors import counted
from ratchet.adapters.process.terminal import hanging
from ratchet.tasks.reports.facts import BROKEN, STOPPED, RunFacts, explain, kind_of, read_facts
from ratchet.tasks.reports.tables import fitted
from ratchet.tasks.storage.dotted_keys import Json
from ratchet.tasks.storage.files import JsonRow, read_rows, version_of, write_rows
from ratchet.tasks.storage.run_folder import RunFolder, all_runs, runs_root

COUNTS = ("tokens", "min", "USD")
RUN_COLUMNS = ("run", "agent", "steps", "held-out", "measures", "parent", "state", *COUNTS)
SHORTENED_COLUMNS = ("run", "agent", "measures", "parent", "state")
"""Columns that are shortened in a narrow terminal."""
THOUSANDS = ((10**9, "G"), (10**6, "M"), (10**3, "k"))


@dataclass(frozen=True)
class RunRow:
    """Run in a list of runs.

    Its state is running (a process trains it), finished, stopped (it can be continued), damaged or
    unreadable (`trouble` says why); and whether `ratchet serve` serves a checkpoint of it.
    An update in doubt was under way when the run stopped; continuing rebuilds the weights before
    it. `doing` says what a running run does, on the board.
    """

    facts: RunFacts
    state: str
    doing: str = ""
    trouble: str = ""
    differences: Sequence[tuple[str, str]] = field(default=())
    """Keys whose values differ from most recipes of its agent, and their values."""

    @property
    def name(self) -> str:
        return self.facts.name

    def cells(self) -> list[object]:
        """Return what the table shows of the run, by RUN_COLUMNS."""
        of = self.facts
        named = [self.name, None if of.trouble else of.agent]
        if self.trouble:
            return [*named, None, None, None, None, self.state, None, None, None]
        return [
            *named,
            f"{of.done}/{of.steps}",
            str(of.held_out) or None,
            of.own_gains or None,
            of.parent or None,
            self.state,
            count(of.tokens[-1]) if of.done else None,
            None if of.keys.get("rollouts.lag") or not of.done else f"{of.seconds / 60:.1f}",
            None if of.cost is None else f"{of.cost:.2f}",
        ]

    def record(self) -> dict[str, Json]:
        """Return the run for programs: numbers as they are, null where nothing is known."""
        named: dict[str, Json] = {"run": self.name, "state": self.state, "trouble": self.trouble}
        if self.trouble:
            return named
        of = self.facts
        return {
            **named,
            "agent": of.agent,
            "done": of.done,
            "steps": of.steps,
            "measure": of.held_out.measure,
            "held_out": {f"{step}": value for step, value in of.held_out.by_step.items()},
            "measures": {
                name: {f"{step}": value for step, value in means.items()}
                for name, means in of.own_measures.items()
            },
            "parent": of.parent or None,
            "tokens": of.tokens[-1],
            "seconds": None if of.keys.get("rollouts.lag") else of.seconds,
            "usd": of.cost,
        }

    def explanation(self) -> str:
        """Say what stands below the table: why the run cannot be read, or its last error, whole,
        and where the places of its rollouts are kept."""
        if self.trouble:
            return f"{self.name}: {self.trouble}"
        failed = self.facts.sum("rollouts/failed")
        if not failed and not self.state.startswith(STOPPED):
            return ""
        try:
            failure = self.facts.last_failure()
        except BROKEN as damage:
            return f"{self.name}: {explain(damage)}"
        lost = f"{counted(failed, 'rollout')} failed, " if failed else ""
        kept = self.facts.run.kept_places()
        place = (
            f"\n{counted(len(kept), 'place')} of rollouts kept in {kept[0].parent}" if kept else ""
        )
        return hanging(f"{self.name}, {lost}the last error in {failure}{place}") if failure else ""


def read_runs() -> list[RunFacts]:
    """Return the facts of all runs, the newest first, and unreadable runs last."""
    runs = map(read_facts, all_runs())
    return sorted(runs, key=lambda of: "" if of.trouble else of.created, reverse=True)


def read_row(
    facts: RunFacts,
    is_open: bool,
    differences: Sequence[tuple[str, str]] = (),
    look: Callable[[RunFolder], str] | None = None,
) -> RunRow:
    """Read what a list shows of a run; a file that cannot be read is the row's trouble.

    With `look` it has what a running run does.
    """
    if facts.trouble:
        return RunRow(facts, "unreadable", trouble=facts.trouble, differences=differences)
    try:
        _ = facts.tokens, facts.cost, facts.seconds, facts.sum("rollouts/failed"), facts.held_out
        state = facts.state(is_open)
        doing = look(facts.run) if look is not None and state == "running" else ""
    except BROKEN as error:
        return RunRow(facts, kind_of(error), trouble=explain(error), differences=differences)
    return RunRow(facts, state, doing, differences=differences)


def list_runs() -> list[JsonRow]:
    """List what is shown of runs, by name; a finished run is read anew only if it has changed.

    What is known of finished runs is in a file beside them, which may be deleted.
    """
    file, known, ours = runs_root() / ".finished.jsonl", dict[str, JsonRow](), version("ratchet-rl")
    with suppress(FileNotFoundError, *BROKEN):
        known = {row["run"]: row for row in read_rows(file)}
    rows = [_read_shown(run, known.get(run.name, {}), ours) for run in all_runs()]
    finished = [row for row in rows if row["version"]]
    if finished and finished != [*known.values()]:
        with suppress(OSError):  # who may not write there reads them all again
            write_rows(file, finished)
    return rows


def _read_shown(run: RunFolder, known: JsonRow, by: str) -> JsonRow:
    """Return a run's cells, record and explanation; its `version` is empty until it is finished."""
    files = run.manifest, run.metrics, run.end, run.places
    folders = (run.path / name for name in ("evaluations", "measures", "spans"))
    is_open, stated = run.is_open(), f"{by} {version_of([*files, *folders])}"
    if known.get("version") == stated and not is_open:
        return known
    row = read_row(read_facts(run), is_open)
    return {
        "run": run.name,
        "version": stated if row.state.startswith("finished") and not is_open else "",
        "cells": row.cells(),
        "record": row.record(),
        "explanation": row.explanation(),
    }


def runs_table(width: int, *, sized: bool = False) -> str:
    """Return the runs as a table of at most `width` letters; below it, whole, what is wrong."""
    rows, root = list_runs(), runs_root()
    if not rows:
        return f"{root} holds no runs yet; `ratchet train` makes one"
    columns, cells = [*RUN_COLUMNS], [row["cells"] for row in rows]
    if sized:
        columns.append("bytes")
        sizes = [sum(RunFolder(root / row["run"]).sizes().values()) for row in rows]
        cells = [[*own, count(size)] for own, size in zip(cells, sizes, strict=True)]
    table = fitted(columns, cells, width, SHORTENED_COLUMNS)
    return "\n\n".join([table, *filter(None, (row["explanation"] for row in rows))])


def count(number: float) -> str:
    """Write a count in at most five letters: 940, 93.8k, 1.2M."""
    for size, unit in THOUSANDS:
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"


def show(value: Json) -> str:
    """Format a value of a recipe; the board's filter compares this text."""
    return value if isinstance(value, str) else "–" if value is None else str(value)


def find_differences(runs: Sequence[RunFacts]) -> dict[str, list[tuple[str, str]]]:
    """Map each run, by name, to its keys that differ from most of its agent's runs.

    Where no value is common to more than half of these runs, every run shows its value.
    """
    shown = {
        of.name: {} if of.trouble else {key: show(value) for key, value in of.keys.items()}
        for of in runs
    }
    values: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for of in runs:
        for key, value in shown[of.name].items():
            values[of.agent, key][value] += 1
    common = {
        key: value
        for key, counted in values.items()
        for value, times in counted.items()
        if 2 * times > counted.total()
    }
    return {
        of.name: [
            (key, value)
            for key, value in shown[of.name].items()
            if value != common.get((of.agent, key))
        ]
        for of in runs
    }


def last_reward(facts: RunFacts) -> float:
    """Return the last held-out reward to rank runs by; minus infinity without one."""
    try:
        return facts.headlines[-1].reward if facts.headlines else float("-inf")
    except BROKEN:
        return float("-inf")
