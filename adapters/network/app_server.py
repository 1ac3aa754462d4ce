"""An HTTP server of an ASGI application, by default on loopback, in a thread of its own.

With a certificate the server speaks TLS.
"""

import asyncio
import errno
import socket
import threading

import uvicorn
from starlette.types import ASGIApp

from ratchet.adapters.errors import UserError
from ratchet.adapters.network.addresses import Listener
from ratchet.adapters.process.event_loop import run_event_loop
from ratchet.durable.connections import bounded_protocol
from ratchet.durable.process import collect_garbage

KEEP_ALIVE_SECONDS = 600
"""Longer than clients keep idle connections: the server must not be the first to close one."""

SERVER_CLOSING_SECONDS = 5

ANY_PORT = Listener()


class AppServer:
    """A server that binds its port when it is created and answers between `start` and `stop`."""

    def __init__(self, app: ASGIApp, listener: Listener = ANY_PORT) -> None:
        tls = listener.tls
        config = uvicorn.Config(
            app,
            http=bounded_protocol(),
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=SERVER_CLOSING_SECONDS,
            ssl_certfile=tls and tls.certificate,
            ssl_keyfile=tls and tls.key,
        )
        config.load()  # here, since an error in the server's thread would reach nobody
        self._socket = _bind(listener)
        self.port: int = self._socket.getsockname()[1]
        self.url = listener.url(self.port)
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
        collect_garbage()
        self._thread.start()
        self._server.answering.wait()

    def stop(self) -> None:
        """Wait up to SERVER_CLOSING_SECONDS for requests under way, and close the port."""
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        try:
            run_event_loop(self._server.serve(sockets=[self._socket]))
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


def _bind(listener: Listener) -> socket.socket:
    host, port = listener.host, listener.port
    # asyncio sets TCP_NODELAY only where the protocol is named; without it a call takes 40 ms more.
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        remedy = "stop what listens there, or give another port"
        if error.errno == errno.EADDRNOTAVAIL:
            remedy = "give this machine that address, or name one that it has"
        said = f"cannot listen on port {port} of {host} ({error.strerror}); {remedy}"
        raise UserError(said) from error
    return bound
