"""Prefect's embedded server: it can be started again, and its libraries log at its own level."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import Popen
from typing import Any

import httpx
from prefect.server.api.server import SubprocessASGIServer

ANSWER_SECONDS = 5.0


class EmbeddedServer(SubprocessASGIServer):
    """Prefect's embedded server.

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
            return super()._run_uvicorn_command()


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
