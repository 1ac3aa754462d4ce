"""What a run's measure on held-out examples depends on, beside its weights and its seed."""

from collections.abc import Mapping
from typing import Any

from adapters.door.roles import checkpoint_of
from flows.recipe.algorithm import BASE
from flows.recipe.preferring import START, PreferRecipe
from flows.recipe.recipe import Recipe
from flows.recipe.run_recipe import RunRecipe
from tasks.settings.given import TEST

OF_TRAINING = ("query", "share")
"""Keys of an origin of texts or pairs that say nothing of those that are held out."""
HELD_OUT = ("path", "test_split", "splits", "held_out")
"""Keys of a dataset that say which of its examples are held out."""
TOKENS = ("base", "renderer", "thinking")
"""Keys of a model that say of which tokens a text is."""


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
        **(_compared_by(recipe) if isinstance(recipe, PreferRecipe) else _model(recipe, *TOKENS)),
    }


def _played_by(recipe: Recipe, select: str) -> dict[str, Any]:
    """Map the keys by which held-out rollouts are played; a role may be fixed in evaluations.

    A judge of pairs compares with checkpoint 0, whose weights are then a part of the measure.
    """
    values, rollouts, judge = (
        recipe.model_dump(mode="json"),
        recipe.rollouts,
        recipe.evaluation.judge,
    )
    sampling = rollouts.greedy_sampling() if select == "greedy" else rollouts.sampling()
    asked = {*recipe.plays()[1], *(recipe.plays(judge)[1] if judge.judges else ())}
    fixed = recipe.evaluation.roles
    roles = {role: who for role, who in recipe.roles.items() if role in asked - fixed.keys()}
    by_base = BASE in map(checkpoint_of, (*roles.values(), *fixed.values()))
    beside_start = select != "greedy" and judge.judges and judge.shown() == "pair"
    return {
        "agent": recipe.agent,
        "roles": roles,
        "dataset": {key: values["dataset"][key] for key in HELD_OUT},
        "rollouts": {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "max_calls": rollouts.max_calls,
            "timeout_seconds": rollouts.timeout_seconds,
        },
        **_model(recipe, *["base"] * by_base, *["base", "start"] * beside_start),
    }


def _compared_by(recipe: PreferRecipe) -> dict[str, Any]:
    """Map the keys by which the sides of held-out pairs are compared, and with which reference.

    Of pairs all losses compare alike that have a reference, or none, by sums or by token; labelled
    answers are compared with the loss's z.
    """
    reference, row = recipe.preference.reference, recipe.preference.row()
    by = f"log p{' - log ref' * row.reference}{' by token' * row.by_token}"
    by += " - z" * (row.mismatched and _may_be_labelled(recipe))
    if not row.reference:
        return {"preference": {"loss": by}}
    start = ["start"] * (reference == START)
    return {
        "preference": {"loss": by, "reference": reference},
        **_model(recipe, *TOKENS, *start),
    }


def _may_be_labelled(recipe: PreferRecipe) -> bool:
    """Return whether held-out answers are labelled; what a query chooses may be."""
    held_out = recipe.sources().get(TEST)
    return held_out is None or any("completion" in row["example"] for row in held_out.examples())


def _model(recipe: RunRecipe, *keys: str) -> dict[str, Any]:
    return {"model": {key: getattr(recipe.model, key) for key in keys}}


def _held_out(origin: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in origin.items() if key not in OF_TRAINING}
