"""The command that trains a recipe with several values of its keys."""

from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from adapters.errors import UserError
from adapters.process.terminal import say
from flows.cli.command_line import Verbose, train_stages
from flows.cli.existing_run import IfExists, settle
from tasks.storage.run_folder import name_run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flows.recipe.sweeps.sweep import SweepRecipe

app = typer.Typer()


@app.command()
def sweep(
    name: Annotated[
        str | None,
        typer.Argument(help="A recipe, whose keys are varied, or a sweep: a name or a YAML file."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="section.key=value,value,… : every combination is a run."),
    ] = None,
    replay: Annotated[
        str | None, typer.Option(help="A run whose recorded rollouts every run trains on instead.")
    ] = None,
    select: Annotated[
        str | None,
        typer.Option(help="Measure: reward, greedy, judged, loss or accuracy."),
    ] = None,
    at_once: Annotated[
        int | None,
        typer.Option(help="Runs that workers of the Prefect server train at the same time."),
    ] = None,
    deployment: Annotated[
        str | None, typer.Option(help="The deployment by which they train them, FLOW/NAME.")
    ] = None,
    run: Annotated[str | None, typer.Option(help="The sweep's name.")] = None,
    if_exists: Annotated[
        IfExists, typer.Option(help="What to do where the sweep exists; only a terminal is asked.")
    ] = IfExists.ASK,
    verbose: Verbose = False,
) -> None:
    """Train a recipe with several values of its keys, and choose the best run."""
    if (name is None) == (replay is None):
        raise UserError("a sweep is of a recipe or of a run's rollouts; give NAME or --replay RUN")
    given = {"select": select, "at_once": at_once, "deployment": deployment}
    chosen = {key: value for key, value in given.items() if value is not None}
    recipe = make_recipe(name, replay, chosen, set_ or [])
    run = run or name_run(name or f"{replay}", "sweep", f"{datetime.now():%Y%m%d-%H%M%S}")
    say(train_stages(run, recipe, settle(run, if_exists)))


def make_recipe(
    name: str | None,
    replay: str | None,
    chosen: "Mapping[str, str | int]",
    overrides: "Sequence[str]",
) -> "SweepRecipe":
    """Return a sweep: one that is named, or one of the keys that are given several values.

    The options of the command that are `chosen` are keys of its recipe.
    """
    from flows.recipe.loading import changed_recipe, named_recipe
    from flows.recipe.run_recipe import FlowRecipe, RunRecipe
    from flows.recipe.sweeps.sweep import SweepRecipe
    from tasks.storage.manifest import recipe_of
    from tasks.storage.run_folder import folder_of

    if name is not None and isinstance(named_recipe(name, (), FlowRecipe), SweepRecipe):
        options = [f"{key}={value}" for key, value in chosen.items()]
        return named_recipe(name, [*overrides, *options], SweepRecipe)
    several = [one for one in overrides if "," in one]
    fixed = [one for one in overrides if "," not in one]
    if not several:
        raise UserError("no key has several values; give --set KEY=VALUE,VALUE")
    if name is not None:
        base = named_recipe(name, fixed, RunRecipe)
    else:
        base = changed_recipe(recipe_of(folder_of(replay or "")), fixed, RunRecipe)
    grid = {key: text.split(",") for key, _, text in (one.partition("=") for one in several)}
    varied = {"base": base.model_dump(mode="json"), "replay": replay, "grid": grid}
    return changed_recipe({"flow": "sweep", **varied, **chosen}, (), SweepRecipe)
