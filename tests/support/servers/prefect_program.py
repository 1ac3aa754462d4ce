"""The program of the tests' Prefect server: it starts at the first connection to its socket, whose
number is its argument, and ends when its standard input closes."""

import os
import select
import socket
import sys
from threading import Thread


def serve(listener: socket.socket) -> None:
    import uvicorn  # which only a session with a test of Prefect needs

    application = "prefect.server.api.server:create_app"
    config = uvicorn.Config(application, factory=True, log_level="error", lifespan="on")
    uvicorn.Server(config).run([listener])


def end_with_standard_input() -> None:
    os.read(0, 1)
    os._exit(0)  # nobody needs the database any more


if __name__ == "__main__":
    listener = socket.socket(fileno=int(sys.argv[1]))
    ready, _, _ = select.select([listener, 0], [], [])
    if 0 not in ready:
        Thread(target=end_with_standard_input, daemon=True).start()
        serve(listener)
