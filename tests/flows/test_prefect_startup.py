"""Prefect's embedded server, as a command starts it."""

import os
import subprocess
from collections.abc import Mapping
from functools import partialmethod
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any, NoReturn

import pytest
from prefect.client.orchestration import get_client
from prefect.server.api.server import SubprocessASGIServer
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
    PREFECT_SERVER_ALLOW_EPHEMERAL_MODE,
    temporary_settings,
)

from adapters.errors import UserError
from flows.cli.command_line import explain_absence
from flows.server.embedded_server import EmbeddedServer
from flows.server.prefect_startup import start_server

LEVEL = "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"


@pytest.mark.parametrize(("of_the_user", "expected"), [(None, "CRITICAL"), ("DEBUG", "DEBUG")])
def test_the_server_s_libraries_print_no_more_than_it_does_unless_the_user_says_so(
    of_the_user: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started_with: list[str | None] = []

    def start(_: SubprocessASGIServer) -> NoReturn:
        started_with.append(os.environ.get(LEVEL))
        raise OSError("no process was wanted")

    monkeypatch.setattr(SubprocessASGIServer, "_run_uvicorn_command", start)
    monkeypatch.setattr(SubprocessASGIServer, "_instances", {})
    monkeypatch.setenv("PREFECT_SERVER_LOGGING_LEVEL", "CRITICAL")
    monkeypatch.delenv(LEVEL, raising=False)
    if of_the_user:
        monkeypatch.setenv(LEVEL, of_the_user)
    embedded: Mapping[Any, Any] = {PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: True}
    with (
        temporary_settings(embedded, restore_defaults={PREFECT_API_URL}),
        start_server() as wait_for_server,
        pytest.raises(OSError, match="no process was wanted"),
    ):
        wait_for_server()
    assert started_with == [expected]
    assert os.environ.get(LEVEL) == of_the_user


def test_a_server_that_does_not_start_is_a_sentence_with_its_database(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(_: SubprocessASGIServer) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", "600"])

    monkeypatch.setattr(SubprocessASGIServer, "_run_uvicorn_command", start)
    monkeypatch.setattr(SubprocessASGIServer, "_instances", {})
    monkeypatch.setattr(EmbeddedServer, "start", partialmethod(EmbeddedServer.start, timeout=1))
    embedded: Mapping[Any, Any] = {PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: True}
    with (
        temporary_settings(embedded, restore_defaults={PREFECT_API_URL}),
        start_server() as wait_for_server,
        pytest.raises(UserError, match=r"does not start .* database in .* set PREFECT_HOME"),
    ):
        wait_for_server()


class _Locked(BaseHTTPRequestHandler):
    """Answers of a Prefect server whose database is locked."""

    def do_GET(self) -> None:
        self.send_error(503)

    def log_message(self, format: str, *_: object) -> None:
        """Log nothing."""


def test_a_server_whose_database_is_locked_is_a_sentence_with_the_way_on() -> None:
    with HTTPServer(("127.0.0.1", 0), _Locked) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/api"
        away: Mapping[Any, Any] = {PREFECT_API_URL: url, PREFECT_CLIENT_MAX_RETRIES: 0}
        with (
            temporary_settings(away),
            pytest.raises(UserError, match=r"answers 503, .* database is locked.*; then resume it"),
            explain_absence(lambda: "resume it"),
            get_client(sync_client=True) as client,
        ):
            client.read_deployment_by_name("train/hello")
        server.shutdown()
