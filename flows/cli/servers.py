"""The commands about servers: Prefect's, its workers and deployments, and a Tinker service."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ratchet.adapters.errors import UserError
from ratchet.adapters.process.terminal import say, show, table_width, write_json
from ratchet.flows.cli.commands import AsJson, Overrides
from ratchet.flows.opening.checks import check_start
from ratchet.flows.recipe.loading import (
    ENTRYPOINTS,
    TRAIN,
    RecipeError,
    changed_recipe,
    count_steps,
    find_deployment,
    flow_name,
    is_carried,
    project_files,
    read_deployments,
)
from ratchet.flows.recipe.plan import PlanRecipe
from ratchet.flows.recipe.run_recipe import FlowRecipe, RunRecipe
from ratchet.tasks.storage.run_folder import folder_of, name_run

PLAYING = ("replay", "evaluate", "compare", "dryrun")
"""Flows that have the recipe of train, and train no new run by it."""


def server(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port on loopback.")] = 4200,
) -> None:
    from ratchet.flows.server.prefect_server import run_server

    run_server(port)


def deploy(
    name: Annotated[
        str | None,
        typer.Argument(help="A deployment of prefect.yaml, or else an example; by default all."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    file, plain = (None, None) if name is None else find_deployment(name)
    files = [file] if file else project_files()
    from ratchet.flows.server.deployments import deploy_files, describe_deployed

    check_deployments(files, plain)
    say("deploying, which takes about half a minute", sys.stderr)
    deployed = deploy_files(files, plain)
    if as_json:
        write_json([asdict(one) for one in deployed])
    else:
        show(describe_deployed(deployed))


def check_deployments(files: Sequence[Path], name: str | None) -> None:
    """Refuse (RecipeError) a deployment that could not run here, as `ratchet train` would.

    Of all deployments, the examples that Ratchet carries are not looked at unless one is named:
    some of them need what a machine may not have.
    """
    for file in files:
        for of, deployment in read_deployments(file).items():
            values = (deployment.get("parameters") or {}).get("recipe")
            chosen = of == name or (name is None and not is_carried(file))
            if not chosen or not isinstance(values, dict):
                continue  # a flow run brings its recipe
            try:
                _check_deployed(flow_name(deployment["entrypoint"]), values, name_run(of, "new"))
            except UserError as error:
                raise RecipeError(f"the deployment {of} cannot run: {error}") from error


def _check_deployed(flow: str, values: dict[str, Any], run: str) -> None:
    """Refuse (UserError) what would end a new run of a deployment's recipe before its steps."""
    from ratchet.flows.sweep import check_runs

    trains = flow in ENTRYPOINTS.values()
    if not trains and flow not in PLAYING:
        return  # it is the user's own
    recipe = changed_recipe({"flow": flow if trains else TRAIN, **values}, (), FlowRecipe)
    if isinstance(recipe, PlanRecipe):
        check_runs(recipe.in_turn(), run)  # workers may come later
    elif isinstance(recipe, RunRecipe) and trains:
        check_start(recipe, folder_of(run))
    elif isinstance(recipe, RunRecipe):  # the run that it needs may come later
        count_steps(recipe).check()


def worker() -> None:
    from ratchet.flows.server.deployments import warn_of_older
    from ratchet.flows.server.prefect_server import run_worker

    warn_of_older()
    run_worker()


def doctor(
    name: Annotated[str | None, typer.Argument(help="A recipe to train there.")] = None,
    set_: Overrides = None,
    url: Annotated[
        str | None, typer.Option(help="The service; by default TINKER_BASE_URL, or the engine.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="The base model; by default the recipe's, or the first.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    from ratchet.flows.diagnosis.doctor import Examined

    examined = Examined.ask(name, set_ or [], url, base)
    if as_json:
        write_json(examined.record())
    else:
        show(examined.table(table_width()))
        say(examined.verdict())
    if examined.refuses:
        raise SystemExit(UserError.status)
