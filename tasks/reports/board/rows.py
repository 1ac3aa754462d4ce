"""A folder of runs → the rows of a table of them, of which the files are read that have changed."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from tasks.reports.board.run_totals import (
    BROKEN,
    MOST_RUNS,
    BoundRun,
    RunTotals,
    evaluations_folder,
    explain,
    kind_of,
    read_totals,
    show,
)
from tasks.reports.curves import HeldOutScore, first_and_last, read_scores
from tasks.reports.progress import ProgressReader
from tasks.reports.tables import describe_state
from tasks.storage.files import FileVersions, version_of
from tasks.storage.run_folder import RunFolder


@dataclass(frozen=True)
class BoardRow:
    """A run in the board's table, with the keys by which its recipe differs from its agent's.

    `held_out` has its first and its last held-out score, and `doing` says what a running one does.
    """

    run: BoundRun
    differences: Sequence[tuple[str, str]]
    totals: RunTotals | None
    state: str
    held_out: Sequence[HeldOutScore] = ()
    doing: str = ""
    trouble: str = ""


def find_differences(runs: Sequence[BoundRun]) -> dict[str, list[tuple[str, str]]]:
    """Map each run, by name, to the keys by which it differs from most of its agent's runs.

    Where no value is that of more than half of them, each run has its own.
    """
    values: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for run in runs:
        for key, value in (run.keys or {}).items():
            values[run.agent, key][show(value)] += 1
    common = {
        key: value
        for key, counted in values.items()
        for value, times in counted.items()
        if 2 * times > counted.total()
    }
    return {
        run.folder.name: [
            (key, shown)
            for key, value in (run.keys or {}).items()
            if (shown := show(value)) != common.get((run.agent, key))
        ]
        for run in runs
    }


def read_row(run: BoundRun, differences: Sequence[tuple[str, str]]) -> BoardRow:
    """Read what the table shows of a run; a file that cannot be read is the row's trouble."""
    if run.keys is None:
        return BoardRow(run, differences, None, "unreadable", trouble=run.trouble)
    try:
        totals, is_held = read_totals(run), run.folder.is_held()
        steps = int(str(run.keys["steps"]))
        state = describe_state(run.folder, totals.done, steps, is_held)
        held_out = _held_out_ends(run)
        doing = str(ProgressReader(run.folder).look()) if state == "running" else ""
    except BROKEN as error:
        return BoardRow(run, differences, None, kind_of(error), trouble=explain(error))
    return BoardRow(run, differences, totals, state, held_out, doing)


def last_reward(run: BoundRun) -> float:
    """Return the last held-out reward, by which runs are ranked; none is the least."""
    try:
        scores = _held_out_ends(run)
    except BROKEN:
        scores = ()
    return scores[-1].reward if scores and run.keys is not None else float("-inf")


def _held_out_ends(run: BoundRun) -> Sequence[HeldOutScore]:
    return _read_ends(run.folder, version_of([evaluations_folder(run.folder)]))


@lru_cache(MOST_RUNS)
def _read_ends(run: RunFolder, _version: FileVersions) -> Sequence[HeldOutScore]:
    return first_and_last(read_scores(run))
