"""Prefect's embedded server, as a command starts it."""

import sys
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import psutil
import pytest
from prefect.client.orchestration import get_client
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
    PREFECT_SERVER_ALLOW_EPHEMERAL_MODE,
    PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS,
    temporary_settings,
)

from ratchet.adapters.errors import UserError
from ratchet.flows.cli.training import explain_absence
from ratchet.flows.server.embedded_server import PROGRAM, EmbeddedServer
from ratchet.flows.server.prefect_startup import begin_server, start_server

LEVEL = "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"

FAILS = f"""
import os, sys
print("Traceback:\\n  in a line\\nsqlite3.DatabaseError: file is no database", file=sys.stderr)
print(os.environ["{LEVEL}"], "Application startup failed.", file=sys.stderr)
raise SystemExit(3)
"""


def start(monkeypatch: pytest.MonkeyPatch, command: list[str], timeout: int) -> None:
    """Start an embedded server by another command."""
    monkeypatch.setattr(EmbeddedServer, "command", lambda _: command)
    monkeypatch.setenv("PREFECT_SERVER_LOGGING_LEVEL", "CRITICAL")
    embedded: Mapping[Any, Any] = {
        PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: False,  # which is about a server of Prefect's own
        PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS: timeout,
    }
    with (
        temporary_settings(embedded, restore_defaults={PREFECT_API_URL}),
        start_server() as served,
        served(),
    ):
        pytest.fail("nothing serves")


def test_a_server_that_loads_ends_when_a_profile_names_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    begin_server()
    [loading] = [child for child in psutil.Process().children() if PROGRAM in child.cmdline()]
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}), start_server():
        assert not loading.is_running()


@pytest.mark.parametrize(("of_the_user", "shown"), [(None, ""), ("DEBUG", "DEBUG Application")])
def test_a_server_that_ends_is_a_sentence_with_its_last_words(
    of_the_user: str | None,
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv(LEVEL, raising=False)
    if of_the_user:
        monkeypatch.setenv(LEVEL, of_the_user)
    monkeypatch.setenv("PREFECT_API_DATABASE_CONNECTION_URL", "postgresql+asyncpg://me:pa55@h/d")
    words = r"3: sqlite3.DatabaseError: file is no database\. .*PREFECT_HOME, PREFECT_API_DATABASE_"
    with pytest.raises(UserError, match=words):
        start(monkeypatch, [sys.executable, "-c", FAILS], timeout=60)
    said = capsys.readouterr().err
    assert shown in said
    assert bool(said) == bool(of_the_user)


def test_a_server_that_does_not_answer_is_a_sentence_with_its_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = r"does not start: it did not answer within 1 s\. Its files are in .*PREFECT_HOME"
    with pytest.raises(UserError, match=said):
        start(monkeypatch, ["sleep", "600"], timeout=1)


class _Failing(BaseHTTPRequestHandler):
    """Answers of a Prefect server that fails."""

    def do_GET(self) -> None:
        self.send_error(503)

    def log_message(self, format: str, *_: object) -> None:
        """Log nothing."""


def test_a_server_that_fails_is_a_sentence_with_the_way_on_and_blames_no_database() -> None:
    with HTTPServer(("127.0.0.1", 0), _Failing) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/api"
        away: Mapping[Any, Any] = {PREFECT_API_URL: url, PREFECT_CLIENT_MAX_RETRIES: 0}
        with (
            temporary_settings(away),
            pytest.raises(UserError, match=r"answers 503\. Look at that server's log; then res"),
            explain_absence(lambda: "resume it"),
            get_client(sync_client=True) as client,
        ):
            client.read_deployment_by_name("train/hello")
        server.shutdown()
