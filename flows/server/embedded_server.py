"""Prefect's embedded server: it ends with its command, and can be started again."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from subprocess import Popen
from typing import Any

import httpx
import psutil
from prefect.server.api.server import SubprocessASGIServer

from adapters.process.children import end_with_this_process

ANSWER_SECONDS = 5.0

APP = "prefect.server.api.server:create_app"
"""Argument by which Prefect starts a server."""
EPHEMERAL = "PREFECT__SERVER_EPHEMERAL"
"""Variable of the environment of an embedded server."""

log = logging.getLogger(__name__)


class EmbeddedServer(SubprocessASGIServer):
    """Prefect's embedded server, which ends with this process, whatever ends that.

    Its libraries log at the server's own level, because SQLAlchemy logs an error for each
    connection that was open while the server stood still.
    """

    _port_range = range(10_000, 30_000)
    """Ports of which one is drawn: two commands that start at once should not draw the same."""

    def restart(self) -> None:
        """Start the server's process again, at its port; it answers some seconds later."""
        self.server_process = self._run_uvicorn_command()

    def answers(self) -> bool:
        """Ask the server whether it is healthy."""
        try:
            return httpx.get(f"{self.api_url}/health", timeout=ANSWER_SECONDS).is_success
        except httpx.TransportError:
            return False

    def _run_uvicorn_command(self) -> Popen[Any]:
        level = os.environ.get("PREFECT_SERVER_LOGGING_LEVEL")
        with _environment(PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL=level):
            server = super()._run_uvicorn_command()
        end_with_this_process(server.pid)
        return server


def sweep_orphans() -> None:
    """Kill the embedded servers, at this process's database, whose own command has ended.

    A server whose parent lives, or that somebody has started for itself, is no such server.
    """
    home = os.environ.get("PREFECT_HOME")
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.ppid() == 1 and APP in process.cmdline():
                variables = process.environ()
                if variables.get(EPHEMERAL) == "1" and variables.get("PREFECT_HOME") == home:
                    log.warning("the Prefect server of process %d is left over: ended", process.pid)
                    process.kill()


@contextmanager
def _environment(**variables: str | None) -> Iterator[None]:
    """Set variables of the environment in the block, unless they are set, or None is given."""
    new = {name: value for name, value in variables.items() if value and name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            del os.environ[name]
