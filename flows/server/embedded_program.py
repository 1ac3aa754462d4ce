"""The program of Prefect's embedded server: it loads, and then serves at the port that stdin names.

A process that loads has opened nothing, so a command starts it first of all.
"""

import gc
import os
import socket
import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

from ratchet.adapters.network.addresses import LOOPBACK
from ratchet.adapters.process.terminal import show

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
    serve = _load(lines)
    serve(int(lines.get()))
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


def _load(lines: Lines) -> Callable[[int], None]:
    """Make Prefect's application, and return what serves it at a port until the next line.

    The garbage collector would look in vain through what is loaded.
    """
    gc.disable()
    import uvicorn
    from prefect.server.api.server import create_app

    class _Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            show(str(self.servers[0].sockets[0].getsockname()[1]))

        async def on_tick(self, counter: int) -> bool:
            """Return True to stop; uvicorn calls this ten times a second."""
            return await super().on_tick(counter) or not lines.empty()

    app = create_app()
    gc.freeze()
    gc.enable()
    return lambda port: _Server(
        uvicorn.Config(app, host=LOOPBACK, port=port, log_level="error", lifespan="on")
    ).run()


if __name__ == "__main__":
    main()
