"""Estimate of a recipe: of its run, or of the runs of its stages or its sweep."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from flows.estimating.dry_training import PlayedPart, dry_recipe
from flows.estimating.given_tokens import estimate_given
from flows.recipe.given_examples import GivenRecipe
from flows.recipe.loading import RecipeError, count_steps
from flows.recipe.plan import PlannedRun, StagesRecipe, SweepRecipe
from flows.recipe.recipe import Recipe
from flows.recipe.run_recipe import FlowRecipe, RunRecipe
from flows.sweep import check_sweep
from tasks.spending.estimate import CostEstimate, EstimatedRun
from tasks.storage.run_folder import RunFolder, folder_of

Play = Callable[[Recipe, str], object]
"""Trains a run by a recipe, of this name."""

OF_UPDATES = ("optimizer", "seed", "checkpoints", "tracking")
"""Sections of a recipe that change nothing of what a dry run of one step is read for."""


@dataclass
class Estimating:
    """Estimates of runs; equal runs of a sweep are played once.

    A run is played by `play`, in a folder named `at`, with so many `examples`.
    """

    play: Play
    at: str
    examples: int
    _played: dict[str, tuple[RunFolder, float]] = field(
        default_factory=dict[str, tuple[RunFolder, float]]
    )

    def estimate(self, recipe: FlowRecipe, name: str) -> CostEstimate:
        """Return the estimate of a recipe of this name; nothing is left of what was played.

        UserError if it cannot be played.
        """
        try:
            return CostEstimate(name, [*self._parts(recipe, name)])
        finally:
            for number in range(len(self._played) + 1):
                if (folder := folder_of(self._run(number))).exists():
                    folder.delete()

    def _run(self, number: int) -> str:
        return f"{self.at}-{number}"

    def _parts(self, recipe: FlowRecipe, name: str) -> Iterator[EstimatedRun]:
        if isinstance(recipe, RunRecipe):
            yield self._part(recipe, name)
        elif isinstance(recipe, StagesRecipe):
            yield from self._stages(recipe, name)
        elif isinstance(recipe, SweepRecipe):
            if recipe.replay is not None:
                raise RecipeError(
                    f"the sweep {name} trains on the recorded rollouts of {recipe.replay}, and "
                    "plays none that could be estimated; estimate a sweep that plays its own"
                )
            alone = recipe.model_copy(update={"at_once": 1})
            for child in check_sweep(alone, name).children:
                yield self._part(child.recipe, child.name)

    def _stages(self, recipe: StagesRecipe, name: str) -> Iterator[EstimatedRun]:
        """Yield the estimate of each stage, played from where the first one starts."""
        for child in recipe.children(name):
            yield self._part(_unstarted(child), child.name)
        if recipe.evaluate is not None:
            whole = self._part(recipe.evaluate, f"{name}, its agent")
            yield _evaluations_of(whole, recipe.evaluate, len(recipe.stages) + 1)

    def _part(self, recipe: RunRecipe, name: str) -> EstimatedRun:
        recipe = count_steps(recipe)
        if isinstance(recipe, GivenRecipe):
            with TemporaryDirectory() as folder:
                return estimate_given(recipe, name, RunFolder(Path(folder)))
        assert isinstance(recipe, Recipe), f"flow {recipe.flow} has a recipe of neither kind"
        folder, seconds = self._play(dry_recipe(recipe, self.examples))
        return PlayedPart(recipe, self.examples, folder, seconds).part(name)

    def _play(self, recipe: Recipe) -> tuple[RunFolder, float]:
        """Play a dry run, unless an equal one was; return its folder and its seconds."""
        values = recipe.model_dump(mode="json", exclude={*OF_UPDATES})
        values["model"].pop("lora_rank")
        key = json.dumps(values, sort_keys=True)
        if key not in self._played:
            run, started = self._run(len(self._played)), time.monotonic()
            self.play(recipe, run)
            self._played[key] = folder_of(run), time.monotonic() - started
        return self._played[key]


def _unstarted(child: PlannedRun) -> RunRecipe:
    """Return the recipe of a stage without its start, which is not there before it is trained."""
    if not child.awaits:
        return child.recipe
    model = child.recipe.model.model_copy(update={"start": None, "start_optimizer": False})
    return child.recipe.model_copy(update={"model": model})


def _evaluations_of(part: EstimatedRun, recipe: Recipe, times: int) -> EstimatedRun:
    """Return what so many evaluations take, of the estimate of a run."""
    evaluation, steps = recipe.evaluation, count_steps(recipe).steps
    due = sum(evaluation.due(step, steps) for step in range(steps + 1))
    lines = [line.scaled(times / due) for line in part.lines if line.purpose == "evaluation"]
    return replace(part, lines=lines, seconds=None)
