"""Prefect's embedded server, as a command starts it."""

import os
from collections.abc import Mapping
from typing import Any, NoReturn

import pytest
from prefect.server.api.server import SubprocessASGIServer
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_SERVER_ALLOW_EPHEMERAL_MODE,
    temporary_settings,
)

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
