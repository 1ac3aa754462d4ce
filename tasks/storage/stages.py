"""The record of a run of stages: its recipe, and what each of its stages has come to."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tasks.storage.files import is_written
from tasks.storage.json_files import read_json, write_json
from tasks.storage.run_folder import RunFolder

NAMES = ("stage", "run", "starts at", "held-out", "agent's reward", "95 % interval")


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
        held_out = self.held_out or None
        run = f"{self.run}@{self.step}"
        return [self.stage, run, self.start or None, held_out, self.reward, interval]


def write_stages(run: RunFolder, recipe: dict[str, Any], results: Sequence[StageResult]) -> None:
    """Write the record of a run of stages, in place of the one before."""
    run.path.mkdir(parents=True, exist_ok=True)
    write_json(run.stages, {"recipe": recipe, "results": [asdict(one) for one in results]})


def has_stages(run: RunFolder) -> bool:
    """Return whether a run is one of stages, each of which is a run of its own."""
    return is_written(run.stages)


def stages_recipe(run: RunFolder) -> dict[str, Any]:
    """Read the recipe of a run of stages."""
    return read_json(run.stages)["recipe"]


def stage_results(run: RunFolder) -> list[StageResult]:
    """Read what the stages have come to, none of a run without stages."""
    rows = read_json(run.stages)["results"] if has_stages(run) else []
    return [StageResult(**row) for row in rows]


def name_stage_run(run: str, number: int, stage: str) -> str:
    """Return the name of the run of a stage, by its number from 1 and its name."""
    return f"{run}-{number}-{stage}"


def stage_runs(run: RunFolder) -> list[RunFolder]:
    """List the runs of the stages that have begun, in their order; none of a run without stages."""
    stages = stages_recipe(run)["stages"] if has_stages(run) else []
    named = (name_stage_run(run.name, at + 1, one["name"]) for at, one in enumerate(stages))
    runs = (RunFolder(run.path.with_name(name)) for name in named)
    return [one for one in runs if one.exists()]
