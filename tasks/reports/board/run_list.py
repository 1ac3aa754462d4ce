"""A folder of runs → the table of `ratchet runs`: the rows of the board, as text for a terminal."""

from dataclasses import dataclass

from adapters.errors import counted
from adapters.process.terminal import hanging
from tasks.reports.board.run_totals import (
    BROKEN,
    BoundRun,
    RunTotals,
    explain,
    kind_of,
    list_bound_runs,
    read_totals,
)
from tasks.reports.failures import last_failure
from tasks.reports.tables import STOPPED, describe_state, fitted
from tasks.storage.run_folder import runs_root

NAMES = ("run", "agent", "steps", "held-out", "parent", "state", "tokens", "min", "USD")
LONG = ("run", "agent", "parent", "state")
"""Columns that are shortened in a narrow terminal."""
THOUSANDS = ((10**9, "G"), (10**6, "M"), (10**3, "k"))


@dataclass(frozen=True)
class RunLine:
    """Run in the list of runs.

    Its state is running (a process trains it), finished, stopped (it can be continued), damaged or
    unreadable, of which `trouble` says why; and whether `ratchet serve` serves a checkpoint of it.
    An update in doubt was under way when the run stopped; continuing rebuilds the weights before
    it. Without totals nothing of the run could be read.
    """

    run: BoundRun
    state: str
    totals: RunTotals | None = None
    trouble: str = ""

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return self.run.folder.name

    @property
    def steps(self) -> int:
        """Steps that the run has when it is finished; 0 if they are not known."""
        return int(str((self.run.keys or {}).get("steps", 0)))

    def cells(self) -> list[object]:
        """Return what the table shows of the run, by NAMES."""
        named = [self.name, self.run.agent or None]
        if (of := self.totals) is None:
            return [*named, None, None, None, self.state, None, None, None]
        has_lag = (self.run.keys or {}).get("rollouts.lag")
        return [
            *named,
            f"{of.done}/{self.steps}",
            of.measured or None,
            self.run.parent or None,
            self.state,
            count(of.tokens) if of.done else None,
            None if has_lag or not of.done else f"{of.seconds / 60:.1f}",
            None if of.cost is None else f"{of.cost:.2f}",
        ]

    def explanation(self) -> str:
        """Say what stands below the table: why the run cannot be read, or its last error, whole."""
        if self.totals is None:
            return self.trouble and f"{self.name}: {self.trouble}"
        failed = self.totals.failed
        if not failed and not self.state.startswith(STOPPED):
            return ""
        try:
            failure = last_failure(self.run.folder)
        except BROKEN as damage:
            return f"{self.name}: {explain(damage)}"
        lost = f"{counted(failed, 'rollout')} failed, " if failed else ""
        return hanging(f"{self.name}, {lost}the last error in {failure}") if failure else ""


def list_runs() -> list[RunLine]:
    """List the runs, by name."""
    return sorted(map(_read_line, list_bound_runs()), key=lambda line: line.name)


def runs_table(width: int) -> str:
    """Return the runs as a table of at most `width` letters; below it, whole, what is wrong."""
    lines = list_runs()
    if not lines:
        return f"{runs_root()} holds no runs yet; `ratchet train` makes one"
    table = fitted(NAMES, [line.cells() for line in lines], width, LONG)
    return "\n\n".join([table, *filter(None, (line.explanation() for line in lines))])


def count(number: float) -> str:
    """Write a count in at most five letters: 940, 93.8k, 1.2M."""
    for size, unit in THOUSANDS:
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"


def _read_line(run: BoundRun) -> RunLine:
    if run.keys is None:
        return RunLine(run, "unreadable", trouble=run.trouble)
    try:
        totals, steps = read_totals(run), int(str(run.keys["steps"]))
        state = describe_state(run.folder, totals.done, steps, run.folder.is_open())
    except BROKEN as error:
        return RunLine(run, kind_of(error), trouble=explain(error))
    return RunLine(run, state, totals)
