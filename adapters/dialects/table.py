"""The ways in which clients ask: each is a module that reads a body and writes the answer."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from adapters.calls import Completion, Refused, Request
from adapters.chat import Chat
from adapters.dialects import anthropic_messages, openai_chat, openai_responses


class Dialect(Protocol):
    """`read` raises Refused, `error` says it in the client's words.

    `answer` gives the body, and `lines` the same answer as a stream, of one completion, or of as
    many as the request has `answers`.
    """

    @property
    def read(self) -> Callable[[object], Request]: ...
    @property
    def answer(self) -> Callable[..., dict[str, Any]]: ...
    @property
    def lines(self) -> Callable[..., Iterator[str]]: ...
    @property
    def error(self) -> Callable[[Refused], dict[str, Any]]: ...


DIALECTS: dict[str, Dialect] = {
    "/chat/completions": openai_chat,
    "/responses": openai_responses,
    "/messages": anthropic_messages,
}


def dialect_of(request: HttpRequest) -> Dialect:
    """The dialect of a path; of a path of none, what its client's headers say, or else OpenAI's."""
    asked = request.url.path.removesuffix("/count_tokens")
    for path, dialect in DIALECTS.items():
        if asked.endswith(path):
            return dialect
    return anthropic_messages if "anthropic-version" in request.headers else openai_chat


def write_response(dialect: Dialect, completions: list[Completion], chat: Chat) -> Response:
    """The answer, streamed if the client asked for that; what is recorded is there as a whole."""
    first, *others = completions
    headers = {"x-request-id": first.response_id, "request-id": first.response_id}
    if first.request.fields.get("stream"):
        lines = "".join(dialect.lines(first, chat, *others))
        return Response(lines, headers=headers, media_type="text/event-stream")
    return JSONResponse(dialect.answer(first, chat, *others), headers=headers)


async def write_refusal(request: HttpRequest, error: Exception) -> Response:
    """The refusal. The clients ask again after any 5xx unless they are told not to."""
    assert isinstance(error, Refused)
    again = {} if error.again else {"x-should-retry": "false"}
    return JSONResponse(dialect_of(request).error(error), error.status, headers=again)


async def write_failure(request: HttpRequest, error: Exception) -> Response:
    """The refusal of a request on which the endpoint itself failed."""
    text = f"The endpoint failed ({type(error).__name__}); its log says more."
    return await write_refusal(request, Refused(500, text, code="internal_error"))
