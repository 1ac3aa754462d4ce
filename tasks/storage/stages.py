"""The record of a run of several runs: its recipe, and what its stages or children came to."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tasks.storage.files import is_written
from tasks.storage.json_files import read_json, write_json
from tasks.storage.run_folder import RunFolder

NAMES = ("stage", "run", "starts at", "held-out", "agent's reward", "95 % interval")
SWEPT = ("run", "steps", "held-out", "95 % interval", "chosen", "error")

Table = tuple[Sequence[str], list[list[object]]]
"""Names of columns, and rows; None where there is nothing."""


@dataclass(frozen=True)
class StageResult:
    """A line of the table of stages; the first is of the weights before them.

    `held_out` is what the stage's own run has measured. `reward` is the agent's that plays after
    each stage, if there is one, with the weights of checkpoint `step`.
    """

    stage: str
    run: str
    start: str
    step: int
    held_out: str
    reward: float | None = None
    interval: tuple[float, float] | None = None

    def cells(self) -> list[object]:
        """Return what the table shows, by NAMES; None where there is nothing."""
        interval = " to ".join(f"{bound:.3g}" for bound in self.interval or ()) or None
        held_out = self.held_out.removeprefix("held-out ").partition(" in ")[0] or None
        run = f"{self.run}@{self.step}"
        return [self.stage, run, self.start or None, held_out, self.reward, interval]


@dataclass(frozen=True)
class ChildResult:
    """A line of the table of a sweep; `measured` is of the last checkpoint, unless it failed."""

    run: str
    steps: int
    measured: float | None = None
    interval: tuple[float, float] | None = None
    error: str = ""
    chosen: bool = False

    def cells(self) -> list[object]:
        """Return what the table shows, by SWEPT."""
        interval = " to ".join(f"{bound:.3g}" for bound in self.interval or ()) or None
        chosen, error = "best" if self.chosen else None, self.error or None
        return [self.run, self.steps, self.measured, interval, chosen, error]


def write_stages(run: RunFolder, recipe: dict[str, Any], results: Sequence[StageResult]) -> None:
    """Write the record of a run of stages, in place of the one before."""
    run.path.mkdir(parents=True, exist_ok=True)
    write_json(run.stages, {"recipe": recipe, "results": [asdict(one) for one in results]})


def write_sweep(
    run: RunFolder,
    recipe: dict[str, Any],
    runs: Sequence[str],
    results: Sequence[ChildResult],
    note: str = "",
) -> None:
    """Write the record of a sweep with the names of its runs, in place of the one before.

    The `note` is what a reader of the results has to know.
    """
    run.path.mkdir(parents=True, exist_ok=True)
    rows = [asdict(one) for one in results]
    write_json(run.stages, {"recipe": recipe, "runs": [*runs], "results": rows, "note": note})


def has_stages(run: RunFolder) -> bool:
    """Return whether a run is one of stages or a sweep, whose parts are runs of their own."""
    return is_written(run.stages)


def stages_recipe(run: RunFolder) -> dict[str, Any]:
    """Read the recipe of a run of stages or of a sweep."""
    return read_json(run.stages)["recipe"]


def stage_results(run: RunFolder) -> list[StageResult]:
    """Read what the stages have come to, none of a run without stages."""
    return [StageResult(**row) for row in _record(run)["results"]]


def result_table(run: RunFolder) -> Table:
    """Return what stages, or the runs of a sweep, have come to as a table; empty without them."""
    record = _record(run)
    if "runs" in record:
        return SWEPT, [ChildResult(**row).cells() for row in record["results"]]
    return NAMES, [StageResult(**row).cells() for row in record["results"]]


def chosen_runs(run: RunFolder) -> list[str]:
    """Return the name of the run that a sweep has chosen; nothing if it has not, or is none."""
    return [row["run"] for row in _record(run)["results"] if row.get("chosen")]


def result_note(run: RunFolder) -> str:
    """Return what a reader of the table has to know; an empty text if that is nothing."""
    return _record(run).get("note", "")


def name_stage_run(run: str, number: int, stage: str) -> str:
    """Return the name of the run of a stage, by its number from 1 and its name."""
    return f"{run}-{number}-{stage}"


def stage_runs(run: RunFolder, first: int = 0) -> list[RunFolder]:
    """List the runs that are there of stages or of a sweep, from number `first`; none of others."""
    record = _record(run)
    stages = record["recipe"].get("stages", ())
    named = [name_stage_run(run.name, at + 1, one["name"]) for at, one in enumerate(stages)]
    runs = (RunFolder(run.path.with_name(name)) for name in record.get("runs", named)[first:])
    return [one for one in runs if one.exists()]


def _record(run: RunFolder) -> dict[str, Any]:
    return read_json(run.stages) if has_stages(run) else {"recipe": {}, "results": []}
