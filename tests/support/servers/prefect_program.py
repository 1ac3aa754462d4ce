"""The program of the tests' Prefect server: it starts at the first connection to its socket, whose
number is its argument, and ends when its standard input closes."""

import gc
import os
import select
import socket
import sys
import time
from threading import Thread

COLLECT_SECONDS = 20.0


def serve(listener: socket.socket) -> None:
    import uvicorn  # which only a session with a test of Prefect needs

    application = "prefect.server.api.server:create_app"
    config = uvicorn.Config(application, factory=True, log_level="error", lifespan="on")
    uvicorn.Server(config).run([listener])


def end_with_standard_input() -> None:
    os.read(0, 1)
    os._exit(0)  # nobody needs the database any more


def collect_garbage() -> None:
    """Collect garbage in a thread of its own, so that the event loop never does.

    What it would find there are cursors of connections to SQLite. To finalize one takes the mutex
    of its connection, and a connection that waits for another's transaction has it for 60 seconds:
    an event loop in the middle of that transaction would wait for itself. What the server has made
    until the first collection stays, and is not looked through again.
    """
    gc.disable()
    time.sleep(COLLECT_SECONDS)
    gc.freeze()
    while True:
        time.sleep(COLLECT_SECONDS)
        gc.collect()


if __name__ == "__main__":
    listener = socket.socket(fileno=int(sys.argv[1]))
    ready, _, _ = select.select([listener, 0], [], [])
    if 0 not in ready:
        for apart in (end_with_standard_input, collect_garbage):
            Thread(target=apart, daemon=True).start()
        serve(listener)
