"""The dialects of clients: each is a module that reads a body and writes the answer."""

import os
import re
from collections.abc import Callable, Iterator
from typing import Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from ratchet.adapters.calls import PATHS, Completion, JsonObject, Refused, Request
from ratchet.adapters.dialects import anthropic_messages, openai_chat, openai_responses
from ratchet.adapters.dialects.google_generate import GenerateContent
from ratchet.adapters.redaction import redact
from ratchet.adapters.rendering.chat import Chat


class Dialect(Protocol):
    """A dialect's functions.

    `read` reads a parsed body. It raises Refused for a field that neither API nor model takes.
    `answer` writes the body of an answer from its completions, as many as the request's `answers`,
    with the token ids, if asked for, where vLLM has them. `stream` writes the same answer as the
    lines of a stream, and `write_error` the body of a refusal.

    While an answer is sampled its stream has the lines of `wait`, by the request, the answer's id
    and how often the client was told before; `stream` is then given how often it was told in all,
    and `write_late_error` ends the stream with a refusal. A dialect takes `*_` or `**_` where what
    it writes depends on none of these.
    """

    read: Callable[..., Request]
    answer: Callable[..., JsonObject]
    stream: Callable[..., Iterator[str]]
    write_error: Callable[[Refused], JsonObject]
    wait: Callable[..., str]
    write_late_error: Callable[..., str]


LONGEST_CAUSE = 300

*OTHERS, GOOGLE = PATHS
MODULES: tuple[Dialect, ...] = (openai_chat, openai_responses, anthropic_messages)
DIALECTS: dict[str, Dialect] = dict(zip(OTHERS, MODULES, strict=True))
VERBS = ("generateContent", "streamGenerateContent", "countTokens")
OF_GOOGLE = re.compile(rf"{GOOGLE}/(?P<model>[^/]+):(?P<verb>{'|'.join(VERBS)})$")


def dialect_of(request: HttpRequest) -> Dialect:
    """Return the dialect of a request: by its path, or else by its headers."""
    asked = request.url.path.removesuffix("/count_tokens")
    if named := OF_GOOGLE.search(asked):
        streams = named["verb"] == "streamGenerateContent"
        return GenerateContent(named["model"], streams, request.query_params.get("alt") == "sse")
    for path, dialect in DIALECTS.items():
        if asked.endswith(path):
            return dialect
    if "x-goog-api-key" in request.headers:
        return GenerateContent("")
    return anthropic_messages if "anthropic-version" in request.headers else openai_chat


def write_response(dialect: Dialect, completions: list[Completion], chat: Chat) -> Response:
    """Write the answer, as a stream if the client asked for one; all of it is recorded by now."""
    first, *others = completions
    headers = name_response(first.response_id)
    if first.request.fields.get("stream"):
        lines = "".join(dialect.stream(first, chat, *others))
        return Response(lines, headers=headers, media_type="text/event-stream")
    return JSONResponse(dialect.answer(first, chat, *others), headers=headers)


def name_response(name: str) -> dict[str, str]:
    """Return the headers in which clients of each dialect read the id of an answer."""
    return {"x-request-id": name, "request-id": name}


async def write_refusal(request: HttpRequest, error: Exception) -> Response:
    """Write a Refused. Clients retry after any 5xx unless a header tells them not to."""
    assert isinstance(error, Refused)
    headers = {} if error.retryable else {"x-should-retry": "false"}
    return JSONResponse(dialect_of(request).write_error(error), error.status, headers=headers)


async def write_failure(request: HttpRequest, error: Exception) -> Response:
    """Write the refusal of a request on which the endpoint itself failed; the server logs it."""
    return await write_refusal(request, refusal_of(error))


def refusal_of(error: Exception) -> Refused:
    """Return an error as a refusal, with its cause if nobody foresaw it."""
    if isinstance(error, Refused):
        return error
    text = (
        f"The endpoint failed: {_describe(error)}. The traceback is in the log of process "
        f"{os.getpid()}."
    )
    return Refused(500, text, code="internal_error")


def _describe(error: Exception) -> str:
    """Return an error's type and the beginning of its words, without this process's secrets."""
    return redact(" ".join(f"{type(error).__name__}: {error}".split()))[:LONGEST_CAUSE]
