"""Prefect's embedded server, which ends with its command, and can be started again."""

import atexit
import logging
import os
import re
import sys
import time
from collections import deque
from contextlib import suppress
from subprocess import PIPE, Popen
from threading import Thread
from typing import IO, Any

import httpx
import psutil
from prefect.server.api.server import SubprocessASGIServer
from prefect.settings import (
    PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS,
    get_current_settings,
)

from adapters.network.addresses import LOOPBACK
from adapters.process.child import end_with_this_process
from adapters.process.running_clock import Wait
from adapters.process.terminal import show

ANSWER_SECONDS = 5.0
SERVER_LOOK_SECONDS = 0.2

APP = "prefect.server.api.server:create_app"
"""Argument by which Prefect starts a server."""
EPHEMERAL = "PREFECT__SERVER_EPHEMERAL"
"""Variable of the environment of an embedded server."""
SERVER_LEVEL = "PREFECT_SERVER_LOGGING_LEVEL"
QUIET = "CRITICAL"
"""Default log level of a server; it hides why a start fails."""
CONSOLE_LEVEL = "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"

KEPT_LINES = 200
"""Last lines of a server's output that are kept: an error's whole stack trace."""
CAUSE = re.compile(r"[\w.]*(?:Error|Exception|Interrupt)\b.*")
"""Line of a stack trace that names the error."""

log = logging.getLogger(__name__)


class EmbeddedServer(SubprocessASGIServer):
    """Prefect's embedded server, which ends with this process in any case.

    What the server says is shown only where the user has asked for more than critical lines, since
    SQLAlchemy logs an error for each connection that was open while the server stood still.
    """

    _port_range = range(10_000, 30_000)
    """Ports from which one is drawn, so that two commands rarely draw the same."""

    words: deque[str]
    """Last lines of the server's output."""

    def start(self, timeout: int | None = None) -> None:
        """Start the server, and return when it answers.

        RuntimeError, with its last words, if its process ends first or its time is over. Prefect's
        own `start` starts a process that has ended again, for ever.
        """
        if self.running:
            return
        self.port = self.port or self.find_available_port()
        self.server_process = server = self._run_uvicorn_command()
        self.running = True
        atexit.register(self.stop)
        limit = timeout or PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS.value()
        waiting = Wait("the start of Prefect's embedded server", limit)
        while not self.answers():
            if server.poll() is not None:
                raise RuntimeError(f"it ended with code {server.returncode}{self._last_words()}")
            if waiting.over:
                raise RuntimeError(f"it did not answer within {limit:g} s{self._last_words()}")
            time.sleep(SERVER_LOOK_SECONDS)

    def restart(self) -> None:
        """Start the server's process again, at its port; it answers some seconds later."""
        self.server_process = self._run_uvicorn_command()

    def answers(self) -> bool:
        """Ask the server whether it is healthy."""
        try:
            url = f"{self.api_url}/health"
            return httpx.get(url, timeout=ANSWER_SECONDS, verify=False).is_success
        except httpx.TransportError:
            return False

    def command(self) -> list[str]:
        """Return the words of the command that serves at the port."""
        served = ["--factory", APP, "--host", LOOPBACK, "--port", str(self.port)]
        return [
            sys.executable,
            "-m",
            "uvicorn",
            *served,
            "--log-level",
            "error",
            "--lifespan",
            "on",
        ]

    def _run_uvicorn_command(self) -> Popen[Any]:
        level = os.environ.get(SERVER_LEVEL, "")
        is_quiet = level == QUIET and CONSOLE_LEVEL not in os.environ
        console = {CONSOLE_LEVEL: level} if level else {}
        environment = {
            **console,
            **os.environ,
            **get_current_settings().to_environment_variables(exclude_unset=True),
            **(dict.fromkeys((SERVER_LEVEL, CONSOLE_LEVEL), "ERROR") if is_quiet else {}),
            "PREFECT_UI_ENABLED": "0",
            "PREFECT__SERVER_FINAL": "1",
            EPHEMERAL: "1",
        }
        server = Popen(self.command(), env=environment, stderr=PIPE, text=True, errors="replace")
        end_with_this_process(server.pid)
        self.words = deque(maxlen=KEPT_LINES)
        listening = (server.stderr, self.words, not is_quiet)
        self._listener = Thread(target=_listen, args=listening, daemon=True)
        self._listener.start()
        return server

    def _last_words(self) -> str:
        """Quote the last error in the server's output, or else its last line."""
        self._listener.join(SERVER_LOOK_SECONDS)  # until it has heard all, if the process has ended
        said = [line.strip() for line in [*self.words] if line.strip()]
        causes = [line for line in said if CAUSE.match(line)]
        return f": {(causes or said)[-1]}" if said else ""


def _listen(stream: IO[str], words: deque[str], is_shown: bool) -> None:
    """Keep the last lines of a server's output, and show every line if `is_shown`."""
    with stream:
        for line in stream:
            words.append(line)
            if is_shown:
                show(line.rstrip("\n"), sys.stderr)


def sweep_orphans() -> None:
    """Kill the embedded servers of this process's database whose own command has ended.

    A server whose parent lives, or that is not embedded, is left running.
    """
    home = os.environ.get("PREFECT_HOME")
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.ppid() == 1 and APP in process.cmdline():
                variables = process.environ()
                if variables.get(EPHEMERAL) == "1" and variables.get("PREFECT_HOME") == home:
                    log.warning("the Prefect server of process %d is left over: ended", process.pid)
                    process.kill()
