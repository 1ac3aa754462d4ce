"""The program of Prefect's embedded server: it loads, and then serves at the port that stdin names.

A process that loads has opened nothing, so a command starts it before its last checks.
"""

import gc
import os
import socket
import time
from queue import SimpleQueue
from threading import Thread

from ratchet.adapters.network.addresses import LOOPBACK
from ratchet.adapters.process.terminal import show

APP = "prefect.server.api.server:create_app"
"""Maker of Prefect's application, as uvicorn names it."""
LONGEST_LINE = 64
STOP = b"\n"
"""Line by which the parent has the server end in order."""
CLOSING_SECONDS = 10.0

Lines = SimpleQueue[bytes]
"""What the parent has said, and this process has not heeded yet."""


def main() -> None:
    """Load, and serve at the port of the first line until the next line; port 0 is any free one.

    The first line on stdout names the port when the server answers. The status is 3 if it cannot.
    """
    lines = Lines()
    Thread(target=_follow_stdin, args=(lines,), daemon=True).start()
    _load_libraries()
    _serve(int(lines.get()), lines)
    os._exit(0)  # since Python would tear the libraries down


def _follow_stdin(lines: Lines) -> None:
    """Hear the parent; end at once if it has ended unsaid, also while the libraries are loaded."""
    last = b""
    while line := os.read(0, LONGEST_LINE):
        last = line
        lines.put(line)
    if last == STOP:
        time.sleep(CLOSING_SECONDS)
    os._exit(0)


def _load_libraries() -> None:
    """Import Prefect's server; the garbage collector would look in vain through what it makes."""
    gc.disable()
    import uvicorn  # noqa: F401

    gc.freeze()
    gc.enable()


def _serve(port: int, lines: Lines) -> None:
    import uvicorn

    class _Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            show(str(self.servers[0].sockets[0].getsockname()[1]))

        async def on_tick(self, counter: int) -> bool:
            """Return True to stop; uvicorn calls this ten times a second."""
            return await super().on_tick(counter) or not lines.empty()

    config = uvicorn.Config(
        APP, factory=True, host=LOOPBACK, port=port, log_level="error", lifespan="on"
    )
    _Server(config).run()


if __name__ == "__main__":
    main()
