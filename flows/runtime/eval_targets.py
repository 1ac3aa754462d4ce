"""Targets of an evaluation: a checkpoint of a run, the base model, or a model of LiteLLM."""

from dataclasses import dataclass
from typing import Self

from adapters.calls import POLICY
from adapters.errors import UserError
from flows.recipe.algorithm import BASE
from flows.recipe.loading import count_steps, read_recipe
from flows.recipe.recipe import Recipe
from flows.recipe.run_recipe import Model, RunRecipe, Tracking
from flows.runtime.checks import check_recipe, check_start
from tasks.checkpoints import Ledger, read_checkpoint
from tasks.storage.manifest import latest_run
from tasks.storage.run_folder import folder_of, name_run


@dataclass(frozen=True)
class EvalTarget:
    """A checkpoint of a run: the run, the recipe it is bound to, and the step (None: the last).

    `requested` is the bound recipe with the evaluation that was requested or, if the run learns
    texts, the recipe of the agent with the run's model. `model` is the base model or LiteLLM's, if
    it is one of them that is scored, in a run of its own.
    """

    run: str
    bound: RunRecipe
    requested: Recipe
    step: int | None
    model: str | None = None

    @property
    def title(self) -> str:
        """Name of what is scored: RUN@STEP, or the model."""
        if self.model is not None:
            return self.model
        return f"{self.run}@{Ledger(folder_of(self.run).checkpoints(POLICY)).at(self.step).step}"

    @classmethod
    def find(cls, recipe: Recipe, run: str | None, step: int | None, model: str | None) -> Self:
        """Find what the arguments of `flows.evaluate` name."""
        if model is None:
            return cls._of_run(recipe, run, step)
        if run is not None or step is not None:
            raise UserError(
                f"--model {model} says who is evaluated, and so do --run and --checkpoint; give "
                "one of them: --model RUN@STEP is a run's checkpoint"
            )
        if model in (BASE, recipe.model.base):
            return cls._alone(count_steps(recipe), BASE)
        if "/" in model:
            answered = {
                "model": Model(),
                "roles": {**recipe.roles, POLICY: model},
                "evaluation": recipe.evaluation.model_copy(update={"greedy": False}),
            }
            return cls._alone(count_steps(recipe).model_copy(update=answered), model)
        return cls._of_run(recipe, *read_checkpoint(model))

    @classmethod
    def _of_run(cls, recipe: Recipe, run: str | None, step: int | None) -> Self:
        found = folder_of(run) if run else latest_run(recipe.agent, recipe.roles)
        bound = read_recipe(found)
        if isinstance(bound, Recipe):
            requested = bound.model_copy(update={"evaluation": recipe.evaluation})
        else:
            requested = count_steps(recipe).model_copy(update={"model": bound.model})
        if missing := sorted(requested.policies().keys() - bound.policies().keys()):
            raise UserError(
                f"{found.path} trains no policy {', '.join(missing)}, which {recipe.agent} needs; "
                "name a run that does"
            )
        return cls(found.name, bound, requested, step)

    @classmethod
    def _alone(cls, recipe: Recipe, model: str) -> Self:
        """Return a run of its own, whose checkpoint 0 is the base model."""
        bound = recipe.model_copy(update={"tracking": Tracking()})
        name = name_run(recipe.agent, model, bound.fingerprint()[:8])
        return cls(f"evaluations/{name}", bound, bound, 0, model)


def find_target(
    recipe: Recipe, run: str | None, checkpoint: int | None, model: str | None
) -> EvalTarget:
    """Find what an evaluation is to score; UserError if it does not exist."""
    target = EvalTarget.find(recipe, run, checkpoint, model)
    folder = folder_of(target.run)
    check_start(target.bound, folder)
    check_recipe(target.requested)
    if folder.exists() and target.step is not None:
        Ledger(folder.checkpoints(POLICY)).at(target.step)
    return target
