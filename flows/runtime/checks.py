"""Checks of what a recipe names, before a server, an engine or a run's folder exists.

A command makes them before anything starts, and a flow makes the same ones as its first act, since
a flow may have been started by a Prefect server. What they import is imported where it is needed:
a refusal should not wait for a library.
"""

from pathlib import Path

from adapters.calls import POLICY
from adapters.errors import ServiceError
from adapters.harness.agents import load_agent
from adapters.rendering.renderer_names import TEMPLATE, find_config
from adapters.tinker.engines import LOCAL, check_key, check_reachable, needs_engine
from adapters.tracking.choice import TrackerChoice
from flows.recipe.loading import count_steps
from flows.recipe.recipe import Recipe
from flows.recipe.run_recipe import Model, RunRecipe
from flows.runtime.references import find_reference
from tasks.storage.manifest import check_binding
from tasks.storage.run_folder import RunFolder


def check_start(recipe: Recipe, run: RunFolder) -> Recipe:
    """Return the recipe that a run, new or not, is bound to: its epochs are counted in steps.

    Refuse (UserError) what would end the run before its first rollout.
    """
    recipe = count_steps(recipe)
    check_run(recipe, run)
    check_recipe(recipe)
    return recipe


def check_run(recipe: RunRecipe, run: RunFolder) -> None:
    """Refuse (UserError) what would end a run of any flow, new or not, before its first step."""
    run.check_writable()
    if run.exists():
        check_binding(run, recipe.model_dump(mode="json"), recipe.fingerprint())
    TrackerChoice(**recipe.tracking.model_dump()).check()
    check_service(recipe.model.base)
    find_reference(recipe.reference(), recipe.model.base, run)


def check_service(base: str) -> None:
    """Refuse (UserError) a service or a base model that does not exist.

    A service is only looked for, and asked nothing, so it may still refuse a base model.
    """
    check_key()
    check_reachable()
    check_base_model(base)


def check_recipe(recipe: Recipe) -> None:
    """Refuse (UserError) a recipe that names what does not exist; quick checks come first."""
    check_service(recipe.model.base)
    for source in (recipe.dataset.train_split(), recipe.dataset.held_out_split()):
        source.examples()
    other_roles = sorted(role for role in recipe.roles if role != POLICY)
    if recipe.roles:
        from adapters.door.backends import create_backends  # imports LiteLLM's parts

        create_backends(recipe.roles, recipe.seed)
    load_agent(recipe.agent, other_roles)
    renderer = recipe.model.renderer
    if not renderer.startswith(TEMPLATE):
        find_config(renderer)


def check_base_model(base: str) -> None:
    """Refuse a local model that the engine of this machine does not have."""
    shipped = Model.model_fields["base"].default
    if not needs_engine(base) or base == shipped or Path(base).expanduser().is_dir():
        return
    owner, _, name = base.partition("/")
    if base.startswith(LOCAL) or not owner.strip("~.") or not name or "/" in name:
        raise ServiceError(
            f"there is no base model {base}; give {shipped}, the folder of a Hugging Face model, "
            "or a name of Hugging Face's hub"
        )
