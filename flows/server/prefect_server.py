"""A Prefect server of one's own, and its worker, each by a command of Prefect's."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from prefect.settings import PREFECT_API_URL, PREFECT_HOME

from adapters.errors import UserError
from adapters.network.addresses import LOOPBACK, check_listener
from adapters.process.terminal import say
from adapters.project.modules import check_folder
from flows.server.interface import find_interface
from tasks.storage.files import begin_log
from tasks.storage.run_folder import runs_root

POOL = "ratchet"
"""The work pool of the deployments."""
POOL_TYPE = "process"

LOGGING = Path(__file__).with_name("prefect_logging.yaml")
SETTINGS_PATH, LOG_PATH = "PREFECT_LOGGING_SETTINGS_PATH", "PREFECT_LOGGING_HANDLERS_FILE_FILENAME"
"""Variables of Prefect's: the file of its logging, and the file that this one's `file` writes."""

STDOUT = 1
PREFECT = (sys.executable, "-P", "-m", "prefect")


def run_server(port: int) -> None:
    """Become a Prefect server on loopback, with its UI, which would ask port 4200 for its data."""
    variables = {"PREFECT_UI_API_URL": f"http://{LOOPBACK}:{port}/api", **os.environ}
    if SETTINGS_PATH not in variables:
        log = PREFECT_HOME.value().absolute() / "server.log"
        say(f"the log of the server is {log}; next: `ratchet deploy`, `ratchet worker`", sys.stderr)
        os.close(_log_to(log, variables))
    _become(variables, "server", "start", "--host", LOOPBACK, "--port", str(port))


def run_worker() -> None:
    """Become a worker of the work pool, which is made if it is not there.

    Whatever its parts print, and not log, goes to the end of its log.
    """
    check_folder()
    check_server(variables := client_environment())
    if (interface := find_interface(variables["PREFECT_API_URL"])) is not None:
        variables["PREFECT_UI_URL"] = interface
    if SETTINGS_PATH not in variables:
        log = runs_root().absolute() / "worker.log"
        say(f"the worker runs what is scheduled, until Ctrl-C; its log is {log}", sys.stderr)
        os.dup2(_log_to(log, variables), STDOUT)
    _become(variables, "worker", "start", "--pool", POOL, "--type", POOL_TYPE)


def _log_to(log: Path, variables: dict[str, str]) -> int:
    """Name a log to Prefect, and return it open."""
    variables |= {SETTINGS_PATH: str(LOGGING), LOG_PATH: str(log)}
    return begin_log(log)


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
