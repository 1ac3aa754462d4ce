"""Recipes of runs that end early."""

from ratchet.flows.recipe.recipe import Recipe
from tests.support.runs.small_recipe import small_recipe

ALWAYS = "held_out/reward/mean >= -1e9"
"""A condition that checkpoint 0 meets."""


def stopping(stop: dict[str, object], **changes: object) -> Recipe:
    """Return a recipe of six steps that measures each second checkpoint, with a `stop`.

    Its `rollouts` are changed by the key.
    """
    evaluation = {"examples": 2, "greedy": False, "every": 2}
    values = small_recipe(steps=6, evaluation=evaluation).model_dump()
    rollouts = values["rollouts"] | changes.pop("rollouts", {})
    return Recipe.model_validate({**values, "stop": stop, "rollouts": rollouts, **changes})
