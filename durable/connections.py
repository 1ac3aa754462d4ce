"""Connections of a server whose clients have shown no key: bounded in time and in number."""

import asyncio
import resource
from typing import Any

from h11 import SEND_BODY
from uvicorn.protocols.http.auto import AutoHTTPProtocol

LONGEST_SILENCE = 25.0
"""Seconds that a client may take for its first request, and then between parts of a request."""
LAST_LOOK = 1.0
"""Seconds of it that begin anew after a delay of the loop, in which a part may have come."""
UNAUTHORIZED = 401
PROTOCOL: Any = AutoHTTPProtocol
"""The protocol by httptools or, without that, by h11; both have the same parts."""


def bounded_protocol() -> type[asyncio.Protocol]:
    """Return the protocol of one server, which counts that server's connections."""
    return type("Bounded", (_Bounded,), {"strangers": {}})


def most_strangers() -> int:
    """Return how many connections without a key a server keeps: half of what it may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(16, min(4096, soft // 2))


class _Bounded(PROTOCOL):
    """A connection, which is a stranger's until the application reads a body or answers not 401.

    A stranger's is closed LONGEST_SILENCE seconds after it began or was last refused, or earlier
    for a newer connection; another's if a request of its stands still for as long.
    """

    strangers: "dict[_Bounded, None]"

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._application, self.app = self.app, self._answer
        self._timer: asyncio.TimerHandle | None = None
        self._is_known = False
        self._has_begun = False
        """Whether a request has begun and is not whole, as httptools tells."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        while len(self.strangers) >= most_strangers():
            next(iter(self.strangers))._cut()
        self.strangers[self] = None
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self.strangers.pop(self, None)
        self._stop_waiting()
        super().connection_lost(exc)
        self.app = self._application  # its own method would keep the connection in memory

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_partial():
            if self._is_known:
                self._wait()
        elif self._is_known or (self.cycle is not None and not self.cycle.response_complete):
            self._stop_waiting()

    def on_message_begin(self) -> None:
        self._has_begun = True
        super().on_message_begin()

    def on_message_complete(self) -> None:
        self._has_begun = False
        super().on_message_complete()

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        async def receive_body() -> Any:
            self._know()
            return await receive()

        async def send_part(message: Any) -> None:
            if message.get("status", UNAUTHORIZED) != UNAUTHORIZED:
                self._know()
            await send(message)

        await self._application(scope, receive_body, send_part)
        if not self._is_known:
            self._wait()

    def _is_partial(self) -> bool:
        """Return whether a request has begun and is not whole; h11, the other parser, knows it."""
        connection = getattr(self, "conn", None)
        if connection is None:
            return self._has_begun
        return connection.their_state is SEND_BODY or bool(connection.trailing_data[0])

    def _know(self) -> None:
        if not self._is_known:
            self._is_known = True
            self.strangers.pop(self, None)

    def _wait(self) -> None:
        self._stop_waiting()
        if self.transport.is_closing():
            return
        self._timer = self.loop.call_later(LONGEST_SILENCE - LAST_LOOK, self._look)

    def _look(self) -> None:
        self._timer = self.loop.call_later(LAST_LOOK, self._cut)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _cut(self) -> None:
        if self._is_known and self.flow.read_paused:
            self._wait()  # for the application, which has not read what came
            return
        self.strangers.pop(self, None)
        self._stop_waiting()
        self.transport.abort()
