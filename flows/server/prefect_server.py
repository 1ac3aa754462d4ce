"""A Prefect server of one's own, and its worker, each by a command of Prefect's."""

import os
import sys
from pathlib import Path

from prefect.settings import PREFECT_API_URL

from adapters.network.addresses import LOOPBACK
from adapters.project.modules import check_folder

POOL = "ratchet"
"""The work pool of the deployments."""

PREFECT = (sys.executable, "-P", "-m", "prefect")


def run_server(port: int) -> None:
    """Become a Prefect server on loopback, with its UI, which would ask port 4200 for its data."""
    variables = {"PREFECT_UI_API_URL": f"http://{LOOPBACK}:{port}/api", **os.environ}
    _become(variables, "server", "start", "--host", LOOPBACK, "--port", str(port))


def run_worker() -> None:
    """Become a worker of the work pool."""
    check_folder()
    _become(client_environment(), "worker", "start", "--pool", POOL)


def _become(variables: dict[str, str], *words: str) -> None:
    """Replace this process by a command of Prefect's."""
    os.execve(PREFECT[0], [*PREFECT, *words], variables)


def client_environment() -> dict[str, str]:
    """Return the variables of a server's clients: it is `run_server`'s unless another is set."""
    api = PREFECT_API_URL.value() or f"http://{LOOPBACK}:4200/api"
    return {**os.environ, "PREFECT_API_URL": api, "PWD": str(Path.cwd())}
