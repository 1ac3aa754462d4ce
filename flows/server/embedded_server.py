"""Prefect's embedded server, which ends with its command, and can be started again."""

import atexit
import os
import re
import sys
from collections import deque
from subprocess import PIPE
from threading import Thread
from typing import IO

from ratchet.adapters.network.addresses import LOOPBACK
from ratchet.adapters.process.child import ChildProcess, tell_status
from ratchet.adapters.process.clock import Wait
from ratchet.adapters.process.terminal import show
from ratchet.adapters.redaction import cut

ANSWER_SECONDS = 5.0
SERVER_CLOSING_SECONDS = 5.0
LAST_WORD_SECONDS = 0.2

PROGRAM = "ratchet.flows.server.embedded_program"
SERVER_LEVEL = "PREFECT_SERVER_LOGGING_LEVEL"
QUIET = "CRITICAL"
"""Default log level of a server; it hides why a start fails."""
CONSOLE_LEVEL = "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"
CONSOLE = {
    "PREFECT_LOGGING_HANDLERS_CONSOLE_CLASS": "ratchet.flows.server.server_console.ServerConsole"
}
"""Setting of a server, whose terminal has one line for a database that is away."""

LEFT_OUT = {
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_ENABLED": "0",
    "PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED": "0",
}
"""Settings that keep no row of an event or its resources, which no page here shows, and that run no
automation, for which Prefect makes its application a second time."""

KEPT_LINES = 200
"""Last lines of a server's output that are kept: an error's whole stack trace."""
CAUSE = re.compile(r"[\w.]*(?:Error|Exception|Interrupt)\b.*")
"""Line of a stack trace that names the error."""


class EmbeddedServer:
    """Prefect's embedded server, whose process loads from now on and serves once it is started.

    What it says is shown only where the user has asked for more than critical lines.
    """

    def __init__(self) -> None:
        self._port = 0
        self.words = deque[str](maxlen=KEPT_LINES)
        """Last lines of the server's output."""
        self.child = self._load()

    @property
    def api_url(self) -> str:
        return f"http://{LOOPBACK}:{self._port}/api"

    def start(self) -> None:
        """Tell the process to serve; it answers when its database is there."""
        atexit.register(self.stop)
        self._tell()

    def wait(self, limit: float) -> None:
        """Wait until the server answers.

        RuntimeError, with its last words, if its process ends first or `limit` seconds are over.
        """
        waiting = Wait("the start of Prefect's embedded server", limit)
        while (port := self.child.hear(waiting.until_next())) is None:
            if waiting.over:
                raise RuntimeError(f"it did not answer within {limit:g} s{self.last_words()}")
            waiting.speak()
        if not port:
            status = self.child.end(SERVER_CLOSING_SECONDS)
            raise RuntimeError(f"it {tell_status(status)}{self.last_words()}")
        self._port = int(port)

    def last_words(self) -> str:
        """Quote the last error in the server's output, or else its last line, behind a colon."""
        if self.child.process.poll() is not None:
            self._listener.join(LAST_WORD_SECONDS)  # until it has heard all
        said = [line.strip() for line in [*self.words] if line.strip()]
        causes = [line for line in said if CAUSE.match(line)]
        return f": {cut((causes or said)[-1])}" if said else ""

    def restart(self) -> None:
        """Start the server's process again, at its port; it answers some seconds later."""
        self.child.end(0)
        self.child = self._load()
        self._tell()

    def answers(self) -> bool:
        """Ask the server whether it is healthy."""
        import httpx  # not before the process is begun

        try:
            url = f"{self.api_url}/health"
            return httpx.get(url, timeout=ANSWER_SECONDS, verify=False).is_success
        except httpx.TransportError:
            return False

    def stop(self) -> None:
        """Have the process end in order, or else kill it; it may have ended."""
        if self.child.process.poll() is None:
            self.child.tell(b"")
        self.child.end(SERVER_CLOSING_SECONDS)

    def command(self) -> list[str]:
        return [sys.executable, "-P", "-m", PROGRAM]

    def _load(self) -> ChildProcess:
        level = os.environ.get(SERVER_LEVEL, "")
        console = {CONSOLE_LEVEL: level} if level else {}
        environment = {
            **LEFT_OUT,
            **CONSOLE,
            **console,
            **os.environ,
            **(dict.fromkeys((SERVER_LEVEL, CONSOLE_LEVEL), "ERROR") if _is_quiet() else {}),
            "PREFECT_UI_ENABLED": "0",
            "PREFECT__SERVER_FINAL": "1",
            "PREFECT__SERVER_EPHEMERAL": "1",
        }
        return ChildProcess(self.command(), environment, PIPE)

    def _tell(self) -> None:
        """Tell the process its port, and hear from now on what it says."""
        self.child.tell(str(self._port).encode())
        self.words.clear()
        listening = (self.child.take_stderr(), self.words, not _is_quiet())
        self._listener = Thread(target=_listen, args=listening, daemon=True)
        self._listener.start()


def _is_quiet() -> bool:
    """Return whether the user has asked for no more than critical lines."""
    return os.environ.get(SERVER_LEVEL) == QUIET and CONSOLE_LEVEL not in os.environ


def _listen(stream: IO[bytes], words: deque[str], is_shown: bool) -> None:
    """Keep the last lines of a server's output, and show every line if `is_shown`."""
    with stream:
        for read in stream:
            line = read.decode(errors="replace").rstrip("\n")
            words.append(line)
            if is_shown:
                show(line, sys.stderr)
