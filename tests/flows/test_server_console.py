"""The terminal of a Prefect server: one line for a database that does not answer or is locked."""

import asyncio
import io
import logging
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import asyncpg
import pytest
from prefect.settings import PREFECT_API_DATABASE_CONNECTION_URL, temporary_settings
from sqlalchemy import create_engine, text

from ratchet.adapters.errors import UserError
from ratchet.flows.server import server_console
from ratchet.flows.server.deployments import run_server
from ratchet.flows.server.prefect_startup import quiet_prefect
from ratchet.flows.server.server_console import DROPPING, ServerConsole

NOBODY = "postgresql://me:pa55word@127.0.0.1:9/away"


def ask_nobody(_: Path) -> None:
    asyncio.run(asyncpg.connect(NOBODY, timeout=5))


def ask_locked(folder: Path) -> None:
    engine = create_engine(f"sqlite:///{folder / 'd'}", connect_args={"timeout": 0})
    with closing(sqlite3.connect(folder / "d", isolation_level=None)) as another:
        another.execute("BEGIN EXCLUSIVE")
        with engine.connect() as connection:
            connection.execute(text("create table t (x)"))


def read_missing(folder: Path) -> None:
    (folder / "none").read_text()


def ask_nonsense(folder: Path) -> None:
    with create_engine(f"sqlite:///{folder / 'd'}").connect() as connection:
        connection.execute(text("select nonsense"))


@pytest.fixture
def printed() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def log(printed: io.StringIO) -> Callable[[Callable[[Path], None], Path], None]:
    """Log the error of a function three times, as three services would."""
    console = ServerConsole(stream=printed)

    def log(asks: Callable[[Path], None], folder: Path) -> None:
        for name in ("docket.dependencies", "prefect.server", "uvicorn.error"):
            record = logging.makeLogRecord({"name": name, "levelno": 40, "msg": "a service fails"})
            try:
                asks(folder)
            except Exception as error:  # noqa: BLE001 - whatever it is, as a service logs it
                record.exc_info = (type(error), error, error.__traceback__)
            console.handle(record)
        for name in DROPPING:
            console.handle(logging.makeLogRecord({"name": name, "msg": "Dropping event"}))
        console.handle(logging.makeLogRecord({"name": "prefect.server", "msg": "something else"}))

    return log


@pytest.mark.parametrize(("asks", "cause"), [(ask_nobody, "Refused"), (ask_locked, "is locked")])
def test_an_absence_of_the_database_is_one_line_without_a_password_until_it_is_over(
    asks: Callable[[Path], None],
    cause: str,
    log: Callable[[Callable[[Path], None], Path], None],
    printed: io.StringIO,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with temporary_settings({PREFECT_API_DATABASE_CONNECTION_URL: NOBODY}):
        log(asks, tmp_path)
    line, *others = printed.getvalue().splitlines()
    assert "the database 127.0.0.1 does not answer (" in line
    assert cause in line
    assert "pa55word" not in line
    assert others == ["something else"]
    monkeypatch.setattr(server_console, "QUIET_SECONDS", 0.0)
    log(asks, tmp_path)
    assert printed.getvalue().count("does not answer (") == 4


@pytest.mark.parametrize(("asks", "cause"), [(read_missing, "none"), (ask_nonsense, "nonsense")])
def test_another_error_of_a_server_keeps_its_trace(
    asks: Callable[[Path], None],
    cause: str,
    log: Callable[[Callable[[Path], None], Path], None],
    printed: io.StringIO,
    tmp_path: Path,
) -> None:
    log(asks, tmp_path)
    assert printed.getvalue().count("Traceback") >= 3
    assert cause in printed.getvalue()
    assert "Dropping event" in printed.getvalue()


def test_a_server_without_its_database_is_a_sentence() -> None:
    with (
        temporary_settings({PREFECT_API_DATABASE_CONNECTION_URL: NOBODY}),
        pytest.raises(UserError, match=r"database at 127\.0\.0\.1 cannot be .*refused") as said,
    ):
        run_server(4200)
    assert "pa55word" not in str(said.value)


@pytest.mark.parametrize("own_server", [True, False])
def test_only_clients_of_a_server_of_one_s_own_ask_again_after_500(
    own_server: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So answers a server whose PostgreSQL is away; an embedded one would repeat its own faults."""
    monkeypatch.setattr(os, "environ", {"PREFECT_API_URL": "http://h/api"} if own_server else {})
    quiet_prefect(verbose=True)
    assert os.environ.get("PREFECT_CLIENT_RETRY_EXTRA_CODES") == ("500" if own_server else None)
