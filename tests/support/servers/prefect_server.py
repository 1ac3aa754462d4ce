"""Plugin: one Prefect server with an empty database for a session of tests and all its workers.

The process that leads the session owns the server, which cannot outlive it. The server starts when
the first test that needs it connects, so that other sessions do not wait for its migrations.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

STARTING_SECONDS = 300
PROGRAM = Path(__file__).with_name("prefect_program.py")
PORT = "prefect_port"
"""The key of the server's port in what xdist gives to a worker."""
OWN = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        stack = ExitStack()
        config.stash[OWN] = stack.enter_context(listening_server())
        config.add_cleanup(stack.close)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of xdist the port."""
    node.workerinput[PORT] = node.config.stash[OWN]


@contextmanager
def listening_server() -> Iterator[int]:
    """Run the server's program until the block ends, and yield its port."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    with TemporaryDirectory() as home, socket.create_server(("127.0.0.1", 0)) as listener:
        variables = {
            **kept,
            "PREFECT_HOME": home,
            "PREFECT_LOGGING_LEVEL": "ERROR",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_UI_ENABLED": "0",
            "PREFECT__SERVER_EPHEMERAL": "1",  # without the services that only deployments need
            "PREFECT__SERVER_FINAL": "1",
        }
        program = subprocess.Popen(
            [sys.executable, "-P", str(PROGRAM), str(listener.fileno())],
            env=variables,
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            start_new_session=True,  # Ctrl-C ends the tests first
        )
        port = listener.getsockname()[1]
        listener.close()  # so that a client of a server that has ended is refused
        with program:
            yield port


@pytest.fixture(scope="session")
def prefect_server(request: pytest.FixtureRequest) -> Iterator[None]:
    """Name the session's Prefect server to every flow and task of the tests."""
    import httpx
    from prefect.context import _temporary_global_settings_context, get_settings_context
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker
    from prefect.settings import PREFECT_API_URL, temporary_settings

    given = getattr(request.config, "workerinput", None)
    port = given[PORT] if given else request.config.stash[OWN]
    url = f"http://127.0.0.1:{port}/api"
    httpx.get(f"{url}/health", timeout=STARTING_SECONDS).raise_for_status()
    with (
        temporary_settings({PREFECT_API_URL: url}),
        _temporary_global_settings_context(get_settings_context()),  # for threads
    ):
        yield
        APILogWorker.drain_all()
        EventsWorker.drain_all()
