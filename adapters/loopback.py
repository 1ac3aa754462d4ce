"""An HTTP server of an ASGI application, by default on loopback, in a thread of its own."""

import asyncio
import errno
import socket
import threading
from dataclasses import dataclass
from typing import Self

import uvicorn
from starlette.types import ASGIApp

LOOPBACK = "127.0.0.1"
EVERYWHERE = "0.0.0.0"
KEEP_ALIVE_SECONDS = 600
"""Longer than clients keep idle connections: the server must not be the first to close one."""

CLOSING_SECONDS = 5


class PortTaken(OSError):
    """An error for a port on which another program listens."""


@dataclass(frozen=True)
class Listening:
    """The address of a server; port 0 stands for any port that is free."""

    host: str = LOOPBACK
    port: int = 0

    @classmethod
    def at(cls, address: str) -> Self:
        """Read `host` or `host:port`."""
        host, _, port = address.partition(":")
        return cls(host, int(port or 0))


class LoopbackServer:
    """A server that binds its port when it is created and answers between `start` and `stop`."""

    def __init__(self, app: ASGIApp, port: int = 0, host: str = LOOPBACK) -> None:
        self._socket = _bind(port, host)
        self.port: int = self._socket.getsockname()[1]
        self.host = host
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=CLOSING_SECONDS,
        )
        self._server = _Server(config)
        self._thread = threading.Thread(target=self._serve, name="door", daemon=True)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that the application runs on; RuntimeError before `start`."""
        if self._server.loop is None:
            raise RuntimeError("the server has not been started")
        return self._server.loop

    def start(self) -> None:
        """Start the thread, and return when the server answers."""
        self._thread.start()
        self._server.answering.wait()

    def stop(self) -> None:
        """Wait up to CLOSING_SECONDS for requests under way, and close the port."""
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._server.answering.set()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.answering = threading.Event()
        self.loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self.answering.set()


def _bind(port: int, host: str) -> socket.socket:
    # asyncio sets TCP_NODELAY only where the protocol is named; without it a call takes 40 ms more.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRINUSE:
            raise
        text = f"port {port} on {host} is taken; stop what listens there, or use port 0 for any"
        raise PortTaken(errno.EADDRINUSE, text) from error
    return listener
