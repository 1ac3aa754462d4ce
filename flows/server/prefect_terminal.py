"""The terminal of a worker or a server: what flow runs say, and one line for many warnings."""

import copy
import logging
import time
from pathlib import Path
from typing import Any

import prefect
from prefect.logging.handlers import PrefectConsoleHandler

QUIET_SECONDS = 60.0
"""Time without a warning of Prefect's parts after which the next one is shown again."""
PARTS = f"{Path(prefect.__file__).parent}/"
"""Folder of the code whose warnings are gathered."""
UNDER_PREFECT = ("asyncio", "uvicorn", "sqlalchemy", "docket")
"""Loggers of what Prefect's parts run on."""
RUNS = ("prefect.flow_runs", "prefect.task_runs")
"""Loggers of what a flow or a task run says, which is shown whole."""


class PrefectTerminal(PrefectConsoleHandler):
    """Handler that shows one line for all warnings that Prefect's parts log until they are silent.

    While a server is away or overloaded, each part of it, of a worker and of its flow runs logs
    the stack traces of what it tries again. The log has all of them.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._last = -QUIET_SECONDS
        # Prefect would write to stderr whenever it cannot send log lines to the server.
        logging.raiseExceptions = False

    def emit(self, record: logging.LogRecord) -> None:
        if not is_gathered(record):
            super().emit(record)
            return
        now = time.monotonic()
        first, self._last = now - self._last >= QUIET_SECONDS, now
        if first:
            super().emit(shorten(record))


def is_gathered(record: logging.LogRecord) -> bool:
    """Tell whether a record is a warning of Prefect's parts, and not of a flow or a task run."""
    if record.levelno < logging.WARNING or record.name.startswith(RUNS):
        return False
    return record.pathname.startswith(PARTS) or record.name.startswith(UNDER_PREFECT)


def shorten(record: logging.LogRecord) -> logging.LogRecord:
    """Return the record in one line, without its stack trace."""
    short = copy.copy(record)
    error = record.exc_info[1] if record.exc_info else None
    text = record.getMessage().partition("\n")[0]
    cause = f" ({error}".partition("\n")[0] + ")" if error else ""
    short.msg = f"{text}{cause}; the log has all of it, and what follows"
    short.args, short.exc_info, short.exc_text, short.stack_info = (), None, None, None
    return short
