"""Deployments of prefect.yaml → a refusal of each that could not run, before it is deployed."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from adapters.errors import UserError
from flows.recipe.loading import (
    ENTRYPOINTS,
    TRAIN,
    RecipeError,
    changed_recipe,
    count_steps,
    flow_name,
    is_carried,
    read_deployments,
)
from flows.recipe.plan import StagesRecipe, SweepRecipe
from flows.recipe.recipe import Recipe
from flows.recipe.run_recipe import FlowRecipe, RunRecipe
from flows.runtime.checks import check_recipe, check_start
from flows.stages import check_stages
from flows.sweep import check_sweep
from tasks.storage.run_folder import folder_of, name_run

UNTRAINED = ("replay", "evaluate", "compare", "dryrun")
"""Flows with a recipe that train no new run by it: what they need besides may come later."""


def check_deployments(files: Iterable[Path], name: str | None) -> None:
    """Refuse (RecipeError) a deployment that could not run here, as `ratchet train` would.

    Of all deployments, the examples that Ratchet carries are not looked at unless one is named:
    some of them need what a machine may not have.
    """
    for file in files:
        for of, deployment in read_deployments(file).items():
            if of == name or (name is None and not is_carried(file)):
                parameters = deployment.get("parameters") or {}
                _check(of, flow_name(deployment["entrypoint"]), parameters)


def _check(name: str, flow: str, parameters: Mapping[str, Any]) -> None:
    values = parameters.get("recipe")
    trains = flow in ENTRYPOINTS.values()
    if not isinstance(values, Mapping) or not (trains or flow in UNTRAINED):
        return  # a flow run brings its recipe, or the flow is the user's own
    try:
        recipe = changed_recipe({"flow": flow if trains else TRAIN, **values}, (), FlowRecipe)
        _check_recipe(recipe, name_run(name, "deployed"), trains=trains)
    except UserError as error:
        raise RecipeError(f"the deployment {name} cannot run: {error}") from error


def _check_recipe(recipe: FlowRecipe, run: str, *, trains: bool) -> None:
    """Refuse (UserError) what would end a new run of a recipe before its first step."""
    if isinstance(recipe, StagesRecipe):
        check_stages(recipe, run)
    elif isinstance(recipe, SweepRecipe):
        check_sweep(recipe.model_copy(update={"at_once": 1}), run)  # workers come later
    elif isinstance(recipe, RunRecipe) and trains:
        check_start(recipe, folder_of(run))
    elif isinstance(recipe, Recipe):
        check_recipe(count_steps(recipe))
