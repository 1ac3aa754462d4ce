"""A Prefect server of one's own, and its worker, each by a command of Prefect's; its interface."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import httpx
from prefect.settings import PREFECT_API_URL, get_current_settings

from ratchet.adapters.errors import UserError
from ratchet.adapters.network.addresses import LOOPBACK, check_listener
from ratchet.adapters.process.terminal import say

POOL = "ratchet"
"""The work pool of the deployments."""
POOL_TYPE = "process"
ANSWER_SECONDS = 5.0

PREFECT = (sys.executable, "-P", "-m", "prefect")


def run_server(port: int) -> None:
    """Become a Prefect server on loopback, with its UI, which would ask port 4200 for its data."""
    variables = {"PREFECT_UI_API_URL": f"http://{LOOPBACK}:{port}/api", **os.environ}
    say("next: `ratchet deploy`, `ratchet worker`", sys.stderr)
    _become(variables, "server", "start", "--host", LOOPBACK, "--port", str(port))


def run_worker() -> None:
    """Become a worker of the work pool, which is made if it is not there."""
    check_server(variables := client_environment())
    if (interface := find_interface(variables["PREFECT_API_URL"])) is not None:
        variables["PREFECT_UI_URL"] = interface
    say("the worker runs what is scheduled, until Ctrl-C", sys.stderr)
    _become(variables, "worker", "start", "--pool", POOL, "--type", POOL_TYPE)


def check_server(variables: Mapping[str, str]) -> None:
    """Raise UserError if nothing listens at the address of the server that variables name."""
    address = variables["PREFECT_API_URL"]
    try:
        check_listener(address)
    except (OSError, ValueError) as error:
        raise UserError(
            f"the Prefect server at {address} cannot be reached ({error}); start one with "
            "`ratchet server`, or name another one by PREFECT_API_URL"
        ) from error


def _become(variables: dict[str, str], *words: str) -> None:
    """Replace this process by a command of Prefect's."""
    os.execve(PREFECT[0], [*PREFECT, *words], variables)


def client_environment() -> dict[str, str]:
    """Return the variables of a server's clients: it is `run_server`'s unless another is set."""
    api = PREFECT_API_URL.value() or f"http://{LOOPBACK}:4200/api"
    return {**os.environ, "PREFECT_API_URL": api, "PWD": str(Path.cwd())}


def find_interface(api_url: str) -> str | None:
    """Return the address of the interface that a server shows by default, for a flow's links.

    Prefect takes it to be that of the API without `/api`, where a server has its older interface.
    None if the user has named one, or if the server tells none, as an older one, one without an
    interface, or Prefect's cloud.
    """
    address = api_url.rstrip("/").removesuffix("/api")
    if "ui_url" in get_current_settings().model_fields_set or address == api_url.rstrip("/"):
        return None
    try:
        told = httpx.get(f"{address}/ui-settings", timeout=ANSWER_SECONDS).raise_for_status().json()
        base = told[f"{told['default_ui']}_base_url"]
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return None
    return f"{address}{base}".rstrip("/") if isinstance(base, str) else None
