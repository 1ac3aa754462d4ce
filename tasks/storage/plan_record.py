"""The record of a run of several runs: its recipe, the runs' names, and their results."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ratchet.tasks.storage.files import is_written, read_json, write_json
from ratchet.tasks.storage.run_folder import RunFolder, runs_root

Table = tuple[Sequence[str], list[list[object]]]
"""Names of columns, and rows; None where there is nothing."""
ArmOfRun = tuple[str, Sequence[str]]
"""Name of the arm that a run is of, and the names of all arms of its sweep."""
Examples = Mapping[str, tuple[float, float]]
"""Held-out example of a run → its part of the run's measure, and its weight."""


@dataclass(frozen=True)
class ChildResult:
    """A line of the table: a run, and what its checkpoint `step` is measured by, unless it failed.

    The line of a stage has its name, where its weights started, and what its own run has measured
    on `held_out` examples, in words. The first line of stages may be of the weights before them.
    The runs of an `arm` of a sweep differ by their `seed` alone.
    """

    run: str
    step: int
    stage: str = ""
    start: str = ""
    held_out: str = ""
    measured: float | None = None
    interval: tuple[float, float] | None = None
    chosen: bool = False
    error: str = ""
    arm: str = ""
    seed: int | None = None


@dataclass(frozen=True)
class Arm:
    """Runs of a sweep that differ by their seed alone: the mean of what those that ended measure.

    `difference` is from the first arm, `paired` by seed and example. `interval` and `within` hold
    them with 95 % confidence: for other examples, and from three seeds on for other seeds.
    """

    name: str
    runs: Sequence[str]
    seeds: int
    mean: float | None = None
    interval: tuple[float, float] | None = None
    difference: float | None = None
    within: tuple[float, float] | None = None
    paired: bool = False
    chosen: bool = False


@dataclass(frozen=True)
class PlanRecord:
    """Record of a run of several runs; `measure` names what the results' `measured` holds."""

    recipe: dict[str, Any]
    runs: Sequence[str]
    measure: str
    results: Sequence[ChildResult] = ()
    arms: Sequence[Arm] = ()

    def chosen(self) -> list[str]:
        """Return the name of the run that was chosen, if one was."""
        return [one.run for one in self.results if one.chosen]

    def tables(self) -> list[Table]:
        """Return the tables of the arms, if there are any, and of the results."""
        made = (self.arms, self._of_arms), (self.results, self.table)
        return [make() for rows, make in made if rows]

    def _of_arms(self) -> Table:
        rows: list[list[object]] = []
        for one in self.arms:
            came_to = [one.mean, _written(one.interval), one.difference, _written(one.within)]
            seeds, chosen = f"{one.seeds} of {len(one.runs)}", "best" if one.chosen else None
            rows.append([one.name, seeds, *came_to, chosen])
        names = ("arm", "seeds", self.measure, "95 % interval", f"less {self.arms[0].name}")
        return (*names, "its 95 % interval", "chosen"), rows

    def table(self) -> Table:
        """Return the results as a table of the columns that have a value in any row."""
        names = ("stage", "run", "step", "starts at", "held-out", self.measure)
        names += ("95 % interval", "chosen", "error")
        rows: list[list[object]] = []
        for one in self.results:
            held_out = one.held_out.removeprefix("held-out ").partition(" in ")[0]
            where = [one.stage or None, one.run, one.step, one.start or None, held_out or None]
            came_to = [one.measured, _written(one.interval), "best" if one.chosen else None]
            rows.append([*where, *came_to, one.error or None])
        kept = [at for at in range(len(names)) if any(row[at] is not None for row in rows)]
        return [names[at] for at in kept], [[row[at] for at in kept] for row in rows]


def _written(interval: tuple[float, float] | None) -> str | None:
    return " to ".join(f"{bound:.3g}" for bound in interval) if interval else None


def write_plan(run: RunFolder, record: PlanRecord) -> None:
    """Write the record of a run of several runs, in place of the one before."""
    with run.stored(whole=False) as put:
        run.path.mkdir(parents=True, exist_ok=True)
        write_json(run.stages, asdict(record))
        put()


def has_plan(run: RunFolder) -> bool:
    """Return whether a run is a run of several runs: stages, or a sweep."""
    return is_written(run.stages)


def all_plans() -> list[RunFolder]:
    """List the runs of several runs, by name."""
    found = sorted(runs_root("").glob("[!.]*/stages.json"))
    return [run for run in map(RunFolder, (path.parent for path in found)) if has_plan(run)]


def read_plan(run: RunFolder) -> PlanRecord:
    """Read the record of a run of several runs; any other run has an empty record."""
    if not has_plan(run):
        return PlanRecord({}, (), "")
    values = read_json(run.stages)
    results = [ChildResult(**row) for row in values["results"]]
    arms = [Arm(**row) for row in values.get("arms", ())]
    return PlanRecord(**{**values, "results": results, "arms": arms})


def arms_of(records: Mapping[str, PlanRecord]) -> dict[str, ArmOfRun]:
    """Map the runs of arms to these; a name begins with that of the record, if this has one."""
    found: dict[str, ArmOfRun] = {}
    for called, record in records.items():
        names = [", ".join(filter(None, [called, arm.name])) for arm in record.arms]
        for arm, name in zip(record.arms, names, strict=True):
            found |= dict.fromkeys(arm.runs, (name, names))
    return found


def child_runs(run: RunFolder, first: int = 0) -> list[RunFolder]:
    """List the children of a run of several runs that exist, from number `first`."""
    named = (RunFolder(run.path.with_name(n)).fetched() for n in read_plan(run).runs[first:])
    return [one for one in named if one.exists()]
