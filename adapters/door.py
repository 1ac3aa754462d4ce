"""The OpenAI-compatible endpoint that agents talk to; its address says whose call it is."""

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from hashlib import sha256
from typing import Any, Self

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.requests import ClientDisconnect

from adapters import openai_chat
from adapters.answers import answered
from adapters.asked import Answer, Delivery, Record, RoleCalls
from adapters.calls import POLICY, Completion, Policy, Refused, Sampling
from adapters.chat import Chat
from adapters.loopback import LoopbackServer
from adapters.recorded import Begin

LARGEST_BODY = 16 * 1024 * 1024
PREFIX = "/rollout/{rollout_id}/attempt/{attempt}/role/{role}/v1"


class Door:
    """Serves the policy to agents on loopback while it is open, and reports every completion.

    `policy` and `sampling` may be set at any time, from any thread; a call is answered by those
    that were set when it arrived. `record` is awaited on the door's own event loop, and no answer
    leaves before it returns; `begin` is told of every call that is about to be sampled, and must
    not block. Only rollout attempts that are admitted are answered.
    """

    def __init__(
        self,
        chat: Chat,
        token: str,
        record: Record,
        defaults: Sampling,
        run_seed: int,
        port: int = 0,
        begin: Begin | None = None,
        max_calls: int | None = None,
    ) -> None:
        self.policy: Policy | None = None
        self.sampling = defaults
        self._chat = chat
        self._token = token.encode()
        self._record = record
        self._begin = begin
        self._run_seed = run_seed
        self._max_calls = max_calls
        self._answerers: dict[str, Callable[[], Answer]] = {POLICY: self._by_policy}
        self._open: dict[tuple[str, int], dict[str, RoleCalls]] = {}
        self._recorded: dict[tuple[str, int], Sequence[Completion]] = {}
        self._failures: dict[tuple[str, int], int] = {}
        self._dismissed: set[tuple[str, int]] = set()
        self._server = LoopbackServer(self._app(), port)

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()

    def url(self, rollout_id: str, attempt: int, role: str = POLICY) -> str:
        """The base URL for an OpenAI client."""
        path = PREFIX.format(rollout_id=rollout_id, attempt=attempt, role=role)
        return f"http://127.0.0.1:{self._server.port}{path}"

    def admit(
        self,
        rollout_id: str,
        attempt: int,
        recorded: Sequence[Completion] = (),
        failures: int = 0,
    ) -> None:
        """Answer this attempt from now on, as `recorded` for as long as the requests are those."""
        self._dismissed.discard((rollout_id, attempt))
        self._recorded[rollout_id, attempt] = recorded
        self._failures[rollout_id, attempt] = failures
        self._open.setdefault((rollout_id, attempt), {})

    def dismiss(self, rollout_id: str, attempt: int) -> Future[int]:
        """Answer it no more. Done when the calls that were under way have been recorded.

        Its result is how many calls were refused because the attempt had made all it may make.
        """
        key = (rollout_id, attempt)
        self._dismissed.add(key)
        return asyncio.run_coroutine_threadsafe(self._close(key), self._server.loop)

    async def _close(self, key: tuple[str, int]) -> int:
        roles = self._open.pop(key, {})
        self._recorded.pop(key, None)
        self._failures.pop(key, None)
        await asyncio.gather(*(calls.finish() for calls in roles.values()))
        return sum(calls.refused for calls in roles.values())

    def _by_policy(self) -> Answer:
        if self.policy is None:
            raise Refused(503, "No policy is served yet; try again.", code="no_policy")
        return partial(
            answered,
            chat=self._chat,
            policy=self.policy,
            sampling=self.sampling,
            run_seed=self._run_seed,
        )

    def _app(self) -> FastAPI:
        app = FastAPI(openapi_url=None, redirect_slashes=False)
        app.add_api_route(f"{PREFIX}/chat/completions", self._chat_completions, methods=["POST"])
        app.add_api_route(f"{PREFIX}/models", self._models, methods=["GET"])
        app.add_exception_handler(404, self._nowhere)
        app.add_exception_handler(405, self._nowhere)
        app.add_exception_handler(Refused, _refuse)
        app.add_exception_handler(Exception, _break)
        return app

    async def _chat_completions(self, request: Request) -> Response:
        calls, answerer = self._whose(request)
        body = await _body(request)
        asked = openai_chat.read(_parsed(body))
        delivery = Delivery(sha256(body).digest(), _retry(request), request.is_disconnected)
        completion = await calls.answer(asked, delivery, answerer)
        headers = {"x-request-id": completion.response_id}
        if asked.fields.get("stream"):
            chunks = openai_chat.chunks(completion, self._chat)
            return StreamingResponse(
                _lines(chunks), headers=headers, media_type="text/event-stream"
            )
        return JSONResponse(openai_chat.answer(completion, self._chat), headers=headers)

    async def _models(self, request: Request) -> Response:
        self._whose(request)
        return JSONResponse(openai_chat.models(request.path_params["role"]))

    async def _nowhere(self, request: Request, _: Exception) -> Response:
        try:
            self._check_token(request)
        except Refused as refused:
            return await _refuse(request, refused)
        where = f"{request.method} {request.url.path}"
        text = f"There is no {where} here: only POST …/v1/chat/completions and GET …/v1/models."
        return await _refuse(request, Refused(404, text, code="unknown_url"))

    def _whose(self, request: Request) -> tuple[RoleCalls, Answer]:
        """The calls that the address names, and who answers them: with what is set now."""
        self._check_token(request)
        named = request.path_params
        rollout_id, attempt, role = named["rollout_id"], named["attempt"], named["role"]
        if role not in self._answerers:
            text = f"Nobody answers the role {role!r}; there is: {', '.join(self._answerers)}."
            raise Refused(404, text, code="no_role")
        key = (rollout_id, int(attempt) if attempt.isdecimal() else -1)
        if key in self._dismissed:
            raise Refused(410, f"{rollout_id}, attempt {attempt}, is over.", code="over")
        roles = self._open.get(key)
        if roles is None:
            text = f"{rollout_id}, attempt {attempt}, is not being played."
            raise Refused(404, text, code="not_admitted")
        calls = roles.get(role)
        if calls is None:
            calls = roles[role] = self._calls_of(*key, role)
        return calls, self._answerers[role]()

    def _calls_of(self, rollout_id: str, attempt: int, role: str) -> RoleCalls:
        recorded = self._recorded.get((rollout_id, attempt), ())
        return RoleCalls(
            rollout_id,
            attempt,
            role,
            chat=self._chat,
            record=self._record,
            begin=self._begin,
            recorded=[completion for completion in recorded if completion.place.role == role],
            failures=self._failures.get((rollout_id, attempt), 0),
            max_calls=self._max_calls,
        )

    def _check_token(self, request: Request) -> None:
        given = request.headers.get("authorization", "").encode()
        if not hmac.compare_digest(given, b"Bearer " + self._token):
            text = "The API key is not this run's; use the one the agent was started with."
            raise Refused(401, text, code="invalid_api_key")


async def _body(request: Request) -> bytes:
    """The body, read to its end even if refused: a client that still writes reads no answer."""
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size <= LARGEST_BODY:
                parts.append(part)
    except ClientDisconnect as error:
        raise Refused(400, "The client left before its request was whole.") from error
    if size > LARGEST_BODY:
        text = f"The body has {size} bytes; the most that is read is {LARGEST_BODY}."
        raise Refused(400, text, code="body_too_large")
    return b"".join(parts)


def _parsed(body: bytes) -> object:
    """The JSON value of a body. Python would also read NaN, and half of a surrogate pair."""
    try:
        value = json.loads(body, parse_constant=_no_constant)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"The body is not JSON ({error}).", code="invalid_json") from error
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _retry(request: Request) -> int | None:
    count = request.headers.get("x-stainless-retry-count", "")
    return int(count) if count.isdecimal() else None


async def _lines(chunks: Iterable[dict[str, Any]]) -> AsyncIterator[str]:
    for chunk in chunks:
        yield f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
    yield "data: [DONE]\n\n"


async def _refuse(_: Request, error: Exception) -> Response:
    """In OpenAI's shape. Its clients ask again after any 5xx unless they are told not to."""
    assert isinstance(error, Refused)
    again = {} if error.again else {"x-should-retry": "false"}
    return JSONResponse(openai_chat.error(error), error.status, headers=again)


async def _break(request: Request, error: Exception) -> Response:
    text = f"The endpoint failed ({type(error).__name__}); its log says more."
    return await _refuse(request, Refused(500, text, code="internal_error"))
