"""The commands about servers: Prefect's, its workers and deployments, and a Tinker service."""

import sys
from dataclasses import asdict
from typing import Annotated

import typer

from ratchet.adapters.errors import UserError
from ratchet.adapters.process.terminal import show, terminal_width, write_json
from ratchet.flows.cli.commands import AsJson, Overrides
from ratchet.flows.recipe.loading import check_project_file, find_deployment


def server(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port on loopback.")] = 4200,
) -> None:
    from ratchet.flows.server.deployments import run_server

    run_server(port)


def deploy(
    name: Annotated[
        str | None,
        typer.Argument(help="A deployment of prefect.yaml, by default all; or an example."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    file, plain = (check_project_file(), None) if name is None else find_deployment(name)
    from ratchet.flows.server.deployments import deploy_file, describe_deployed

    show("deploying, which takes some seconds", sys.stderr)
    deployed = deploy_file(file, plain)
    if as_json:
        write_json([asdict(one) for one in deployed])
    else:
        show(describe_deployed(deployed))


def worker() -> None:
    from ratchet.flows.server.deployments import run_worker

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
    from ratchet.flows.recipe.service_needs import Examined

    examined = Examined.ask(name, set_ or [], url, base)
    if as_json:
        write_json(examined.record())
    else:
        show(examined.table(terminal_width()))
        show(examined.verdict())
    if examined.refuses:
        raise SystemExit(UserError.status)
