"""A Prefect server of one's own, its deployments and its worker, each by a command of Prefect's."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from prefect.settings import PREFECT_API_URL

from adapters.network.addresses import LOOPBACK
from adapters.project.own_names import check_folder

POOL = "ratchet"
"""The work pool of the deployments."""

PREFECT = (sys.executable, "-P", "-m", "prefect")


def run_server(port: int) -> None:
    """Become a Prefect server on loopback, with its UI."""
    _become({**os.environ}, "server", "start", "--host", LOOPBACK, "--port", str(port))


def deploy_all(files: Iterable[Path]) -> None:
    """Create the work pool, and deploy all deployments of the files, of which the last counts.

    SystemExit with Prefect's status if a command of its fails; Prefect says why.
    """
    check_folder()
    commands = [("work-pool", "create", POOL, "--type", "process", "--overwrite")]
    commands += [("--no-prompt", "deploy", "--all", "--prefect-file", str(file)) for file in files]
    for words in commands:
        done = subprocess.run([*PREFECT, *words], env=_client_environment(), check=False)
        if done.returncode:
            raise SystemExit(done.returncode)


def run_worker() -> None:
    """Become a worker of the work pool."""
    check_folder()
    _become(_client_environment(), "worker", "start", "--pool", POOL)


def _become(variables: dict[str, str], *words: str) -> None:
    """Replace this process by a command of Prefect's."""
    os.execve(PREFECT[0], [*PREFECT, *words], variables)


def _client_environment() -> dict[str, str]:
    """Return the variables of a server's clients: it is `run_server`'s unless another is set."""
    api = PREFECT_API_URL.value() or f"http://{LOOPBACK}:4200/api"
    return {**os.environ, "PREFECT_API_URL": api, "PWD": str(Path.cwd())}
