"""The links that a flow prints open the interface that the server shows by default."""

import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect import flow
from prefect.settings import PREFECT_API_URL, PREFECT_UI_URL, temporary_settings

from ratchet.flows.server import prefect_server
from ratchet.flows.server.prefect_server import find_interface
from ratchet.flows.server.prefect_startup import start_server
from tests.support.processes import ROOT, wait_until

PATIENCE_SECONDS = 300.0
PAGE = {"accept": "text/html"}
LINK = re.compile(r"View at (\S+)")


@flow
def nothing() -> None:
    """Do nothing."""


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run `ratchet server`, and yield the address of its API."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    home = str(tmp_path_factory.mktemp("prefect"))
    variables = {**kept, "PREFECT_HOME": home, "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    command = [sys.executable, "-m", "ratchet.flows.cli.main", "server", "--port", str(port)]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, cwd=ROOT, env=variables, stdout=quiet, stderr=quiet) as server:
        url = f"http://127.0.0.1:{port}/api"
        try:
            wait_until("the server", lambda: answers(f"{url}/health"), PATIENCE_SECONDS)
            yield url
        finally:
            server.terminate()


def answers(url: str) -> bool:
    try:
        return httpx.get(url).is_success
    except httpx.TransportError:
        return False


def printed_link(url: str, caplog: pytest.LogCaptureFixture, **of_user: str) -> str | None:
    """Run a flow as a command does beside the server of an address; return the link it prints."""
    settings: Mapping[Any, Any] = {PREFECT_API_URL: url} | (
        {PREFECT_UI_URL: of_user["ui"]} if of_user else {}
    )
    runs = logging.getLogger("prefect.flow_runs")
    with ExitStack() as stack:
        stack.enter_context(temporary_settings(settings))
        stack.enter_context(caplog.at_level(logging.INFO, "prefect.flow_runs"))
        runs.addHandler(caplog.handler)
        stack.callback(runs.removeHandler, caplog.handler)
        stack.enter_context(stack.enter_context(start_server())())
        nothing()
    return next(iter(LINK.findall(caplog.text)), None)


def test_a_printed_link_opens_the_default_interface(
    own_server: str, caplog: pytest.LogCaptureFixture
) -> None:
    link = printed_link(own_server, caplog)
    assert link is not None
    page = httpx.get(link, headers=PAGE, follow_redirects=True)
    assert page.is_success
    assert str(page.url) == link
    scripts = re.findall(r'src="(/[^"]+\.js)"', page.text)
    assert scripts
    assert all(script.startswith("/v2/") for script in scripts)


def test_a_link_to_an_interface_that_the_user_names_stays(
    own_server: str, caplog: pytest.LogCaptureFixture
) -> None:
    link = printed_link(own_server, caplog, ui="https://prefect.example.org")
    assert link is not None
    assert link.startswith("https://prefect.example.org/runs/flow-run/")


@pytest.mark.usefixtures("prefect_server")
def test_a_server_without_an_interface_tells_none() -> None:
    assert find_interface(PREFECT_API_URL.value() or "") is None
    assert find_interface("http://127.0.0.1:9/api") is None
    assert find_interface("https://api.prefect.cloud/api/accounts/1/workspaces/2") is None


def test_the_flow_runs_of_a_worker_print_links_to_the_default_interface(
    own_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = list[dict[str, str]]()
    monkeypatch.setattr(os, "execve", lambda *words: begun.append(words[-1]))
    with temporary_settings({PREFECT_API_URL: own_server}):
        prefect_server.run_worker()
    assert begun[0]["PREFECT_UI_URL"] == own_server.replace("/api", "/v2")


def test_a_flow_beside_the_embedded_server_prints_no_link(tmp_path: Path) -> None:
    program = (
        "from prefect import flow\n"
        "from ratchet.flows.server.prefect_startup import start_server\n"
        "@flow\n"
        "def nothing(): print('done')\n"
        "with start_server() as served, served(): nothing()\n"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    variables = {**kept, "PREFECT_HOME": str(tmp_path), "PREFECT_LOGGING_LEVEL": "INFO"}
    variables["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"] = str(int(PATIENCE_SECONDS))
    (tmp_path / "program.py").write_text(program)
    ran = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")],
        cwd=ROOT,
        env={**variables, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Beginning flow run" in ran.stderr
    assert "View at" not in ran.stderr
