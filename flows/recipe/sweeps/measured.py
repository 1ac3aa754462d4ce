"""What a run's measure on held-out examples depends on, beside its weights and its seed."""

from collections.abc import Mapping
from typing import Any

from flows.recipe.recipe import Recipe
from flows.recipe.run_recipe import RunRecipe

OF_TRAINING = ("query", "share")
"""Keys of an origin of texts or pairs that say nothing of those that are held out."""


def measured_by(recipe: RunRecipe, select: str) -> dict[str, Any]:
    """Map keys of a recipe to what says how held-out examples are measured, for a measure.

    Runs of which it differs cannot be compared.
    """
    values = recipe.model_dump(mode="json")
    if isinstance(recipe, Recipe):
        return {"evaluation": values["evaluation"], **_played_by(recipe, select)}
    dataset = values["dataset"]
    sources = {name: _held_out(one) for name, one in dataset.get("sources", {}).items()}
    return {
        "evaluation": values["evaluation"],
        "dataset": {**_held_out(dataset), "sources": sources},
        "teacher": values.get("teacher"),
    }


def _played_by(recipe: Recipe, select: str) -> dict[str, Any]:
    """Map the keys by which held-out rollouts are played; a role may be fixed in evaluations."""
    dataset, rollouts, judge = recipe.dataset, recipe.rollouts, recipe.evaluation.judge
    sampling = rollouts.greedy_sampling() if select == "greedy" else rollouts.sampling()
    asked = {*recipe.plays()[1], *(recipe.plays(judge)[1] if judge.judges else ())}
    asked -= recipe.evaluation.roles.keys()
    return {
        "agent": recipe.agent,
        "roles": {role: who for role, who in recipe.roles.items() if role in asked},
        "dataset": {"path": dataset.path, "test_split": dataset.test_split},
        "rollouts": {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "max_calls": rollouts.max_calls,
            "timeout_seconds": rollouts.timeout_seconds,
        },
    }


def _held_out(origin: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in origin.items() if key not in OF_TRAINING}
