"""The terminal of a Prefect server, which has one line for a database that is away.

Each service of the server would print a trace every few seconds until the database answers again.
"""

import logging
import sqlite3
import time
from traceback import walk_tb
from typing import Any

import asyncpg
from prefect.logging.handlers import PrefectConsoleHandler
from prefect.settings import PREFECT_API_DATABASE_CONNECTION_URL
from sqlalchemy import make_url
from sqlalchemy.exc import DBAPIError

from ratchet.adapters.redaction import cut

QUIET_SECONDS = 30.0
"""Time without an error after which the next one tells of another absence."""
REFUSALS = (
    *(asyncpg.PostgresConnectionError, asyncpg.CannotConnectNowError),
    *(asyncpg.AdminShutdownError, asyncpg.CrashShutdownError),
)
"""Errors of a PostgreSQL that starts, ends or has cut a connection."""
DROPPING = {
    "prefect.server.services.task_run_recorder",
    "prefect.server.utilities.messaging.memory",
}
"""Loggers that have a line for each event that an absence costs, as of states of task runs."""
LOCKED = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}


class ServerConsole(PrefectConsoleHandler):
    """Handler of the console that prints one line instead of an absence's traces."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._last = -QUIET_SECONDS

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        is_away = now - self._last < QUIET_SECONDS
        if error := _absence(record.exc_info[1]) if record.exc_info else None:
            self._last = now
        if not is_away or not (error or record.name in DROPPING):
            super().emit(_line(error) if error else record)


def _absence(error: BaseException | None) -> BaseException | None:
    """Return the error of a database that does not answer, or is locked, behind an error."""
    while error is not None and not _is_absence(error):
        error = error.__cause__ or error.__context__
    return error


def _is_absence(error: BaseException) -> bool:
    match error:
        case DBAPIError():
            return error.connection_invalidated
        case sqlite3.OperationalError():
            return getattr(error, "sqlite_errorcode", 0) & 0xFF in LOCKED
        case OSError():  # as of a host that is away, or in time; only asyncpg asks a database
            frames = [frame.f_globals["__name__"] for frame, _ in walk_tb(error.__traceback__)]
            return any(name.startswith("asyncpg.") for name in frames)
        case _:
            return isinstance(error, REFUSALS)


def _line(error: BaseException) -> logging.LogRecord:
    url = make_url(PREFECT_API_DATABASE_CONNECTION_URL.value())
    cause = cut(f"{type(error).__name__} {error}").strip()
    said = (
        f"the database {url.host or url.database} does not answer ({cause}); what needs it is "
        "tried again until it does, and pages may miss states of tasks"
    )
    of = {"name": "prefect.server", "levelno": logging.WARNING, "levelname": "WARNING"}
    return logging.makeLogRecord({**of, "msg": said})
