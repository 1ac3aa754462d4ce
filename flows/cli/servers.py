"""The commands about Prefect: its server, workers and deployments."""

import sys
from dataclasses import asdict
from typing import Annotated

import typer

from ratchet.adapters.process.terminal import show, write_json
from ratchet.flows.cli.commands import AsJson
from ratchet.flows.recipe.loading import check_project_file, find_deployment
from ratchet.flows.server.deployments import deploy_file, describe_deployed, run_server
from ratchet.flows.server.worker import run_worker


def server(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port on loopback.")] = 4200,
) -> None:
    run_server(port)


def deploy(
    name: Annotated[
        str | None,
        typer.Argument(help="A deployment of prefect.yaml, by default all; or an example."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    file, plain = (check_project_file(), None) if name is None else find_deployment(name)
    show("deploying, which takes some seconds", sys.stderr)
    deployed = deploy_file(file, plain)
    if as_json:
        write_json([asdict(one) for one in deployed])
    else:
        show(describe_deployed(deployed))


def worker() -> None:
    run_worker()
