"""Streams that begin before their answer is there, since clients give up on a silent connection."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from starlette.responses import Response, StreamingResponse

from ratchet.adapters.calls import Completion, Refused, Request
from ratchet.adapters.dialects.table import Dialect, name_response
from ratchet.adapters.rendering.chat import Chat

Answering = asyncio.Future[list[Completion]]


@dataclass(frozen=True)
class LateStream:
    """The stream of an answer that is being sampled.

    `name` is the answer's id. `refuse` returns an error as a refusal, which it notes.
    """

    dialect: Dialect
    request: Request
    name: str
    refuse: Callable[[Exception], Refused]

    def respond(self, answering: Answering, chat: Chat, seconds: float) -> Response:
        """Respond at once, and every few `seconds` until the answer is there.

        The answer is made and recorded even if the client leaves meanwhile.
        """
        answering.add_done_callback(_retrieve)
        return StreamingResponse(
            self._lines(answering, chat, seconds),
            headers=name_response(self.name),
            media_type="text/event-stream",
        )

    async def _lines(self, answering: Answering, chat: Chat, seconds: float) -> AsyncIterator[str]:
        told = 0
        while not answering.done():
            yield self.dialect.wait(self.request, self.name, told)
            told += 1
            await asyncio.wait([answering], timeout=seconds)
        error = answering.exception()
        if isinstance(error, Exception):
            refused = self.refuse(error)
            yield self.dialect.write_late_error(refused, self.request, self.name, told)
            return
        first, *others = answering.result()
        yield "".join(self.dialect.stream(first, chat, *others, waited=told))


def _retrieve(answering: Answering) -> None:
    """Retrieve an error that a client which has left does not read; asyncio would complain."""
    if not answering.cancelled():
        answering.exception()
