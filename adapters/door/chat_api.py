"""An OpenAI-compatible HTTP endpoint for a chat model, in every dialect that clients speak."""

import asyncio
import hmac
import json
import logging
import os
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from itertools import product
from typing import Protocol, Self

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from ratchet.adapters.calls import PATHS, CallId, Completion, JsonObject, Refused
from ratchet.adapters.calls import Request as ChatRequest
from ratchet.adapters.dialects import anthropic_messages, openai_chat, openai_responses
from ratchet.adapters.dialects.fields import bad_request, refuse_constant
from ratchet.adapters.dialects.google_generate import GenerateContent
from ratchet.adapters.door.format_checks import FormatChecks
from ratchet.adapters.door.role_calls import KeptCalls, RequestMeta, chat_of
from ratchet.adapters.network.addresses import Listener
from ratchet.adapters.network.app_server import ANY_PORT, AppServer
from ratchet.adapters.process.event_loop import run_aside
from ratchet.adapters.redaction import redact
from ratchet.adapters.rendering.chat import Chat, check_length
from ratchet.adapters.rendering.messages import check_json


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

    read: Callable[..., ChatRequest]
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
WORD_SECONDS = 10.0
"""Seconds after which a client whose answer is streamed is told that it is being sampled."""
KEY_HEADERS = ("authorization", "x-api-key", "api-key", "x-goog-api-key")
"""Headers in which clients of OpenAI, Anthropic, Azure and Google send a key."""
LARGEST_BODY = 16 * 1024 * 1024
MOST_BRACKETS = 500_000
"""Bound on the arrays and objects, since their parser lets nothing else run meanwhile."""
DEEPEST_BODY = 200
"""The most levels of nesting; readers of a body are recursive."""


async def read_body(request: Request) -> bytes:
    """Read all of the body even if it is refused: a client that still writes reads no answer."""
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size <= LARGEST_BODY:
                parts.append(part)
    except ClientDisconnect as error:
        raise bad_request("The client disconnected before its request was complete.") from error
    if size > LARGEST_BODY:
        text = f"The body has {size} bytes; the most that is read is {LARGEST_BODY}."
        raise Refused(413, text, code="body_too_large")
    return b"".join(parts)


def parse_json(body: bytes) -> object:
    """Parse strict JSON: no NaN, 1e999 or half a surrogate pair, all of which Python accepts."""
    brackets = body.count(b"[") + body.count(b"{")
    if brackets > MOST_BRACKETS:
        text = (
            f"The body has {brackets} opening brackets; the most that is read is {MOST_BRACKETS}."
        )
        raise Refused(413, text, code="body_too_large")
    try:
        value = json.loads(body, parse_constant=refuse_constant)
        check_json(value, DEEPEST_BODY)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"The body is not JSON ({error}).", code="invalid_json") from error
    return value


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedModel:
    """A model as its clients reach it, which answers a request as often as the request asks.

    `answer` raises Refused for a call that gets no answer. Requests of one `order` are read one
    after the other, as they come: no later request overtakes a long one.
    """

    name: str
    answer: Callable[[ChatRequest, RequestMeta], Awaitable[list[Completion]]]
    order: asyncio.Lock = field(default_factory=asyncio.Lock)
    passed: Collection[str] = ()
    """Fields that this model takes, and no policy does."""
    by_content: Callable[[ChatRequest], "ServedModel"] | None = None
    """Finds the model of a request whose address does not say which one it is."""


class ChatApi(ABC):
    """HTTP server of the chat routes below `prefix`, which answers while it is entered."""

    def __init__(self, chat: Chat, prefix: str, listener: Listener = ANY_PORT) -> None:
        self.chat = chat
        self.prefix = prefix
        self.formats = FormatChecks()
        self.app = self._app()
        self.server = AppServer(self.app, listener)

    def __enter__(self) -> Self:
        self.server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop()
        self.formats.close()

    @property
    def address(self) -> str:
        return self.server.url

    @abstractmethod
    def check_token(self, request: Request) -> None:
        """Refuse (401) a request whose token does not open what the request names."""

    @abstractmethod
    def find_model(self, request: Request) -> ServedModel:
        """Return the model that a request reaches, before its body is read; Refused if none."""

    def _app(self) -> Starlette:
        app = Starlette()
        app.router.redirect_slashes = False
        prefixes = (self.prefix, f"{self.prefix}/v1")  # Anthropic's clients add a /v1
        for prefix, verb in product((*prefixes, f"{self.prefix}/v1beta"), VERBS):
            answer = self._count if verb == "countTokens" else self.answer
            app.add_route(f"{prefix}{GOOGLE}/{{model}}:{verb}", answer, methods=["POST"])
        for prefix in prefixes:
            for path in DIALECTS:
                app.add_route(prefix + path, self.answer, methods=["POST"])
            app.add_route(f"{prefix}/messages/count_tokens", self._count, methods=["POST"])
            app.add_route(f"{prefix}/models", self._models, methods=["GET"])
            app.add_route(f"{prefix}/models/{{name}}", self._model, methods=["GET"])
        app.add_exception_handler(404, self._refuse_route)
        app.add_exception_handler(405, self._refuse_route)
        app.add_exception_handler(Refused, write_refusal)
        app.add_exception_handler(Exception, write_refusal)
        return app

    async def answer(self, request: Request) -> Response:
        """Answer a call in its client's dialect, or raise Refused; a defect is logged first."""
        started = datetime.now(UTC)
        try:
            return await self._answer(request, started)
        except Refused as refused:
            self.note_refusal(request, refused, started)
            raise
        except Exception as error:  # whose cause the client is told, and the record of the call
            raise self._refuse(request, started, error) from error

    @abstractmethod
    def note_refusal(self, request: Request, refused: Refused, started: datetime, /) -> None:
        """Note a request that was refused, and when it came."""

    def _refuse(self, request: Request, started: datetime, error: Exception) -> Refused:
        """Return an error as the refusal of a request, after it was noted; log a defect."""
        refused = refusal_of(error)
        if refused is not error:
            log.error("the endpoint failed on POST %s", request.url.path, exc_info=error)
        self.note_refusal(request, refused, started)
        return refused

    async def _answer(self, request: Request, started: datetime) -> Response:
        model = self.find_model(request)
        body, dialect = await read_body(request), dialect_of(request)
        async with model.order:
            asked = await run_aside(len(body), _read, dialect, body, model.passed)
            if model.by_content is not None:
                model = model.by_content(asked)
                asked = await run_aside(len(body), _read, dialect, body, model.passed)
        await self.formats.check_schema(asked.format)
        retry = read_number(request.headers.get("x-stainless-retry-count", ""))
        calls: list[CallId] = []
        meta = RequestMeta(sha256(body).digest(), retry, request.is_disconnected, calls.append)
        if not asked.fields.get("stream"):
            return write_response(dialect, await model.answer(asked, meta), self.chat)
        answering = asyncio.ensure_future(model.answer(asked, meta))
        try:
            while not answering.done():
                await asyncio.wait([answering], timeout=WORD_SECONDS)
                if calls and not answering.done():
                    # The client may leave, and asyncio complains of an error that nobody reads.
                    answering.add_done_callback(lambda done: done.cancelled() or done.exception())
                    refuse = partial(self._refuse, request, started)
                    name = calls[0].response_id
                    return StreamingResponse(
                        _wait_for(answering, dialect, asked, name, self.chat, refuse),
                        headers=name_response(name),
                        media_type="text/event-stream",
                    )
        except asyncio.CancelledError:
            answering.cancel()
            raise
        return write_response(dialect, answering.result(), self.chat)

    async def _count(self, request: Request) -> Response:
        """Count the tokens of a prompt that is rendered whole, in Anthropic's API or Google's."""
        self.find_model(request)
        body, dialect = await read_body(request), dialect_of(request)
        asked = await run_aside(len(body), _read, dialect, body, ())
        chat = chat_of(self.chat, asked)
        check_length(chat, asked.messages)
        prompt = await run_aside(asked.characters, KeptCalls(chat).prompt_of, asked)
        name = "totalTokens" if isinstance(dialect, GenerateContent) else "input_tokens"
        return JSONResponse({name: len(prompt.token_ids)})

    async def _models(self, request: Request) -> Response:
        return JSONResponse(openai_chat.models(self.find_model(request).name))

    async def _model(self, request: Request) -> Response:
        served, asked = self.find_model(request).name, request.path_params["name"]
        if asked != served:
            text = f"There is no model {asked!r} here; there is: {served}."
            raise Refused(404, text, code="model_not_found")
        return JSONResponse(openai_chat.model(served))

    async def _refuse_route(self, request: Request, _: Exception) -> Response:
        try:
            self.check_token(request)
        except Refused as refused:
            return await write_refusal(request, refused)
        route = f"{request.method} {request.url.path}"
        paths = ", ".join(f"POST …/v1{path}" for path in (*DIALECTS, "/messages/count_tokens"))
        paths += f", POST …/v1beta{GOOGLE}/NAME:VERB with {', '.join(VERBS)}"
        text = f"There is no {route} here: only {paths}, GET …/v1/models and …/v1/models/NAME."
        return await write_refusal(request, Refused(404, text, code="unknown_url"))


def dialect_of(request: Request) -> Dialect:
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


async def write_refusal(request: Request, error: Exception) -> Response:
    """Write a Refused, or the failure of the endpoint itself as one.

    Clients retry after any 5xx unless a header tells them not to.
    """
    refused = refusal_of(error)
    headers = {} if refused.status == 503 else {"x-should-retry": "false"}
    body = dialect_of(request).write_error(refused)
    return JSONResponse(body, refused.status, headers=headers)


def refusal_of(error: Exception) -> Refused:
    """Return an error as a refusal, with its cause if nobody foresaw it."""
    if isinstance(error, Refused):
        return error
    # The type and the first words of the error, without this process's secrets.
    said = redact(" ".join(f"{type(error).__name__}: {error}".split()))[:LONGEST_CAUSE]
    text = f"The endpoint failed: {said}. The traceback is in the log of process {os.getpid()}."
    return Refused(500, text, code="internal_error")


async def _wait_for(
    answering: asyncio.Future[list[Completion]],
    dialect: Dialect,
    request: ChatRequest,
    name: str,
    chat: Chat,
    refuse: Callable[[Exception], Refused],
) -> AsyncIterator[str]:
    """Yield a stream that begins before its answer, since clients give up on a silent connection.

    `name` is the answer's id. The answer is made and recorded even if the client leaves meanwhile.
    """
    told = 0
    while not answering.done():
        yield dialect.wait(request, name, told)
        told += 1
        await asyncio.wait([answering], timeout=WORD_SECONDS)
    error = answering.exception()
    if isinstance(error, Exception):
        yield dialect.write_late_error(refuse(error), request, name, told)
        return
    first, *others = answering.result()
    yield "".join(dialect.stream(first, chat, *others, waited=told))


def _read(dialect: Dialect, body: bytes, passed: Collection[str]) -> ChatRequest:
    return dialect.read(parse_json(body), passed)


def read_number(text: str) -> int | None:
    """Read a number of at most 19 digits; None if the text is no such number."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else None


def token_of(request: Request) -> str:
    """Return the token that a request carries, in whichever header its client sends it."""
    given = (request.headers.get(name, "") for name in KEY_HEADERS)
    return next(filter(None, (re.sub(r"(?i)^bearer +", "", one) for one in given)), "")


def check_key(given: str, expected: str, wrong: str) -> None:
    """Refuse (401) a key that is not the expected one, in the words `wrong`, or no key."""
    if not hmac.compare_digest(given.encode(), expected.encode()):
        none = f"There is no API key; send it in one of the headers {', '.join(KEY_HEADERS)}."
        raise Refused(401, wrong if given else none, code="invalid_api_key")
