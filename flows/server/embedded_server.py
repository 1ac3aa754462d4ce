"""Prefect's embedded server, which ends with its command, and can be started again."""

import atexit
import os
import sys
from subprocess import DEVNULL

from ratchet.adapters.network.addresses import LOOPBACK
from ratchet.adapters.process.child import ChildProcess, tell_status
from ratchet.adapters.process.clock import Wait

ANSWER_SECONDS = 5.0
SERVER_CLOSING_SECONDS = 5.0

PROGRAM = "ratchet.flows.server.embedded_program"
SERVER_LEVEL = "PREFECT_SERVER_LOGGING_LEVEL"
QUIET = "CRITICAL"
"""Default log level of a server, which hides why a start fails."""
CONSOLE_LEVEL = "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"


class EmbeddedServer:
    """Prefect's embedded server, whose process loads from now on and serves once it is started.

    What the server says is shown only where the user has asked for more than critical lines, since
    SQLAlchemy logs an error for each connection that was open while the server stood still.
    """

    def __init__(self) -> None:
        self._port = 0
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

        RuntimeError if its process ends first, or if `limit` seconds are over.
        """
        waiting = Wait("the start of Prefect's embedded server", limit)
        while (port := self.child.hear(waiting.until_next())) is None:
            if waiting.over:
                raise RuntimeError(f"it did not answer within {limit:g} s")
            waiting.speak()
        if not port:
            status = self.child.end(SERVER_CLOSING_SECONDS)
            raise RuntimeError(f"it {tell_status(status)}")
        self._port = int(port)

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

    def drop(self) -> None:
        """End the process of a server that has not been started."""
        self.child.end(0)

    def command(self) -> list[str]:
        """Return the words of the command of the process."""
        return [sys.executable, "-P", "-m", PROGRAM]

    def _load(self) -> ChildProcess:
        level = os.environ.get(SERVER_LEVEL, "")
        is_quiet = level == QUIET and CONSOLE_LEVEL not in os.environ
        environment = {
            **({CONSOLE_LEVEL: level} if level else {}),
            **os.environ,
            "PREFECT_UI_ENABLED": "0",
            "PREFECT__SERVER_FINAL": "1",
            "PREFECT__SERVER_EPHEMERAL": "1",
        }
        return ChildProcess(self.command(), environment, DEVNULL if is_quiet else None)

    def _tell(self) -> None:
        """Tell the process its port."""
        self.child.tell(str(self._port).encode())
