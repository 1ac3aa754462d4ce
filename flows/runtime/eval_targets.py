"""Who is evaluated: a checkpoint of a run, the base model, or any model of LiteLLM."""

from dataclasses import dataclass
from typing import Self

from adapters.calls import POLICY
from adapters.errors import UserError
from flows.recipe import Model, Recipe, Tracking
from tasks.storage.run_folder import folder_of, latest_run, named, recipe_of

BASE = "base"


class ContenderError(UserError):
    """No model answers to the name."""


@dataclass(frozen=True)
class Contender:
    """A run, the recipe that it is bound to, and which of its checkpoints; the last if None.

    `asked` is that recipe with the evaluation that was asked for.
    """

    run: str
    bound: Recipe
    asked: Recipe
    step: int | None

    @classmethod
    def of(cls, recipe: Recipe, run: str | None, step: int | None, model: str | None) -> Self:
        """See `flows.evaluate`."""
        if model is None:
            return cls._of_run(recipe, run, step)
        if run is not None or step is not None:
            raise ContenderError(
                f"--model {model} says who is evaluated, and so do --run and --checkpoint; give "
                "one of them: --model RUN@STEP is a run's checkpoint"
            )
        if model in (BASE, recipe.model.base):
            return cls._apart(recipe, BASE)
        if "/" in model:
            return cls._apart(recipe.model_copy(update=_answered_by(recipe, model)), model)
        return cls._of_run(recipe, *named_checkpoint(model))

    @classmethod
    def _of_run(cls, recipe: Recipe, run: str | None, step: int | None) -> Self:
        folder = folder_of(run) if run else latest_run(recipe.agent, recipe.roles)
        bound = Recipe.model_validate(recipe_of(folder))
        asked = bound.model_copy(update={"evaluation": recipe.evaluation})
        return cls(folder.name, bound, asked, step)

    @classmethod
    def _apart(cls, recipe: Recipe, model: str) -> Self:
        """In a folder of its own, kept as a run is: checkpoint 0 of a run is the base model."""
        bound = recipe.model_copy(update={"tracking": Tracking()})
        name = named(recipe.agent, model, bound.fingerprint()[:8])
        return cls(f"evaluations/{name}", bound, bound, 0)


def named_checkpoint(name: str) -> tuple[str, int | None]:
    """RUN or RUN@STEP; without a step it is the last."""
    run, at, step = name.partition("@")
    if at and not step.isdecimal():
        raise ContenderError(f"{name!r} names no checkpoint; RUN@STEP does, such as {run}@10")
    return run, int(step) if at else None


def _answered_by(recipe: Recipe, model: str) -> dict[str, object]:
    """Nothing is sampled here, so there is no likeliest token to take, and any model will do."""
    return {
        "model": Model(),
        "roles": {**recipe.roles, POLICY: model},
        "evaluation": recipe.evaluation.model_copy(update={"greedy": False}),
    }
