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
from pkgutil import resolve_name
from tempfile import TemporaryDirectory
from typing import Any

import pytest

STARTING_SECONDS = 300
PROGRAM = Path(__file__).with_name("prefect_program.py")
PORT = "prefect_port"
"""The key of the server's port in what xdist gives to a worker."""
OWN = pytest.StashKey[int]()

HIDDEN = (
    "prefect.events.utilities.should_emit_events",  # of the states of tasks
    "ratchet.flows.opening.run.write_run_report",
    "ratchet.tasks.tracking.prefect_pages.write_run_report",
    "ratchet.tasks.tracking.prefect_pages.PrefectPages.close",
)
"""What shows a run: functions that do nothing unless there is something in SHOWN."""
SHOWN: list[bool] = []


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
    """Name the session's Prefect server to every flow and task of the tests.

    A story's runs are shown there as anyone's. Those of other tests are shown only where
    `run_shown` is used: pages, report and states of tasks take nearly half of a small run's time.
    """
    import httpx
    from prefect.context import _temporary_global_settings_context, get_settings_context
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker
    from prefect.settings import (
        PREFECT_API_URL,
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
        temporary_settings,
    )

    given = getattr(request.config, "workerinput", None)
    port = given[PORT] if given else request.config.stash[OWN]
    url = f"http://127.0.0.1:{port}/api"
    httpx.get(f"{url}/health", timeout=STARTING_SECONDS).raise_for_status()
    # A flow run's end would wait for its heartbeat, up to a second.
    settings: dict[Any, Any] = {PREFECT_API_URL: url, PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}
    with (
        temporary_settings(settings),
        _temporary_global_settings_context(get_settings_context()),  # for threads
        pytest.MonkeyPatch.context() as patch,
    ):
        if request.config.getoption("markexpr") != "story":
            _hide_runs(patch)
        yield
        APILogWorker.drain_all()
        EventsWorker.drain_all()


def _hide_runs(patch: pytest.MonkeyPatch) -> None:
    for name in HIDDEN:
        whole = resolve_name(name)
        patch.setattr(name, lambda *given, _whole=whole: bool(SHOWN) and _whole(*given))


@pytest.fixture(scope="module")
def run_shown(prefect_server: None) -> Iterator[None]:
    """Show the module's later runs as anyone's."""
    with shown():
        yield


@contextmanager
def shown() -> Iterator[None]:
    """Show the runs of a block, and let Prefect know the states of their tasks."""
    SHOWN.append(True)
    try:
        yield
    finally:
        SHOWN.pop()
