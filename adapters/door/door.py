"""The endpoint that agents talk to as to OpenAI or Anthropic; its address says whose call it is."""

import asyncio
import hmac
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any, Self

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse

from adapters.calls import POLICY, Completion, Example, Policy, Refused, Sampling
from adapters.chat import Chat
from adapters.dialects import anthropic_messages, openai_chat, openapi
from adapters.dialects.request_body import parse_json, read_body
from adapters.dialects.structured import format_instructions
from adapters.dialects.table import (
    DIALECTS,
    dialect_of,
    write_failure,
    write_refusal,
    write_response,
)
from adapters.door.backends import Backend
from adapters.door.call_sequence import Delivery, RoleCalls
from adapters.door.policy_backend import PolicyBackend
from adapters.door.recorded import Answer, Begin, Record
from adapters.loopback import LOOPBACK, LoopbackServer

PREFIX = "/rollout/{rollout_id}/attempt/{attempt}/role/{role}/v1"


@dataclass(frozen=True, slots=True)
class Admitted:
    """A rollout attempt that is answered: what it was admitted with, and its calls by role."""

    recorded: Sequence[Completion]
    failures: int
    example: Example
    roles: dict[str, RoleCalls] = field(default_factory=dict)


class Door:
    """Serves the policy to agents on loopback while it is open, and reports every completion.

    `policy`, `others` (more of them, by name) and `sampling` may be set at any time, from any
    thread; a call is answered by those that were set when it arrived. `record` is awaited on the
    door's own event loop, and no answer leaves before it returns; `begin` is told of every call
    that is about to be answered, and must not block. Only rollout attempts that are admitted are
    answered. `roles` says who answers the roles beside `policy`; a policy is named. `beside` is
    answered at the same port, behind whatever guards it.
    """

    prefix = PREFIX

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
        roles: Mapping[str, Backend | str] | None = None,
        host: str = LOOPBACK,
        beside: APIRouter | None = None,
    ) -> None:
        self.policy: Policy | None = None
        self.others: Mapping[str, Policy] = {}
        self.sampling = defaults
        self._chat = chat
        self._token = token.encode()
        self._record = record
        self._begin = begin
        self._run_seed = run_seed
        self._max_calls = max_calls
        self._backends = {
            role: partial(self._by_policy, who) if isinstance(who, str) else who
            for role, who in {POLICY: POLICY, **(roles or {})}.items()
        }
        self._admitted: dict[tuple[str, int], Admitted] = {}
        self._dismissed: set[tuple[str, int]] = set()
        app = self._app()
        if beside is not None:
            app.include_router(beside)
        self._server = LoopbackServer(app, port, host)

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"http://{self._server.host}:{self._server.port}"

    def url(self, rollout_id: str, attempt: int, role: str = POLICY) -> str:
        """The base URL for a client of either."""
        path = self.prefix.format(rollout_id=rollout_id, attempt=attempt, role=role)
        return f"http://127.0.0.1:{self._server.port}{path}"

    def admit(
        self,
        rollout_id: str,
        attempt: int,
        recorded: Sequence[Completion] = (),
        failures: int = 0,
        example: Example | None = None,
    ) -> None:
        """Answer this attempt from now on, as `recorded` for as long as the requests are those."""
        self._dismissed.discard((rollout_id, attempt))
        self._admitted[rollout_id, attempt] = Admitted(recorded, failures, example or {})

    def dismiss(self, rollout_id: str, attempt: int) -> Future[int]:
        """Answer it no more. Done when the calls that were under way have been recorded.

        Its result is how many calls were refused because the attempt had made all it may make.
        """
        key = (rollout_id, attempt)
        self._dismissed.add(key)
        return asyncio.run_coroutine_threadsafe(self._close(key), self._server.loop)

    def ask(
        self, rollout_id: str, attempt: int, role: str, body: Mapping[str, Any]
    ) -> Future[dict[str, Any]]:
        """What a chat completion over HTTP answers, for a caller in this process; from any thread.

        Its exception is Refused. A caller that cancels it has left, like a client that hangs up.
        """
        asked = self._ask((rollout_id, attempt), role, dict(body))
        return asyncio.run_coroutine_threadsafe(asked, self._server.loop)

    async def _ask(self, key: tuple[str, int], role: str, body: dict[str, Any]) -> dict[str, Any]:
        task = asyncio.current_task()

        async def gone() -> bool:
            return task is not None and task.cancelling() > 0

        calls, answer = self._calls_for(key, role)
        written = json.dumps(body, sort_keys=True).encode()
        delivery = Delivery(sha256(written).digest(), 0, gone)
        asked = openai_chat.read(parse_json(written))
        completion, *others = await calls.answers(asked, delivery, answer)
        return openai_chat.answer(completion, self._chat, *others)

    async def _close(self, key: tuple[str, int]) -> int:
        admitted = self._admitted.pop(key, None)
        roles = [] if admitted is None else [*admitted.roles.values()]
        await asyncio.gather(*(calls.finish() for calls in roles))
        return sum(calls.refused for calls in roles)

    def _by_policy(self, name: str, _: Example) -> Answer:
        policy = self.policy if name == POLICY else self.others.get(name)
        if policy is None:
            raise Refused(503, "No policy is served yet; try again.", code="no_policy")
        return PolicyBackend(self._chat, policy, self.sampling, self._run_seed).answer

    def _app(self) -> FastAPI:
        app = FastAPI(openapi_url=None, redirect_slashes=False)
        for prefix in (self.prefix, f"{self.prefix}/v1"):  # Anthropic's clients add a /v1
            for path in DIALECTS:
                app.add_api_route(prefix + path, self._answer, methods=["POST"])
            app.add_api_route(f"{prefix}/messages/count_tokens", self._count, methods=["POST"])
            app.add_api_route(f"{prefix}/models", self._models, methods=["GET"])
            app.add_api_route(prefix + openapi.PATH, self._document, methods=["GET"])
        app.add_exception_handler(404, self._nowhere)
        app.add_exception_handler(405, self._nowhere)
        app.add_exception_handler(Refused, write_refusal)
        app.add_exception_handler(Exception, write_failure)
        return app

    async def _answer(self, request: Request) -> Response:
        calls, answer = self._whose(request)
        body, dialect = await read_body(request), dialect_of(request)
        asked = dialect.read(parse_json(body))
        retry = _number(request.headers.get("x-stainless-retry-count", ""))
        delivery = Delivery(sha256(body).digest(), retry, request.is_disconnected)
        return write_response(dialect, await calls.answers(asked, delivery, answer), self._chat)

    async def _count(self, request: Request) -> Response:
        """The length of a prompt that is rendered whole, as Anthropic's clients ask for it."""
        self._whose(request)
        asked = anthropic_messages.read(parse_json(await read_body(request)))
        prompt = self._chat.render([*asked.messages, *format_instructions(asked)], asked.tools)
        return JSONResponse({"input_tokens": len(prompt)})

    async def _models(self, request: Request) -> Response:
        self._whose(request)
        return JSONResponse(openai_chat.models(self._model_of(request)))

    async def _document(self, request: Request) -> Response:
        """Behind the key as all is: who has none learns nothing of a run, not even its routes."""
        self._whose(request)
        return JSONResponse(openapi.document(request.url.path.removesuffix(openapi.PATH)))

    def _model_of(self, request: Request) -> str:
        return request.path_params["role"]

    async def _nowhere(self, request: Request, _: Exception) -> Response:
        try:
            self._check_token(request)
        except Refused as refused:
            return await write_refusal(request, refused)
        where = f"{request.method} {request.url.path}"
        paths = ", ".join(f"POST …/v1{path}" for path in DIALECTS)
        text = (
            f"There is no {where} here: only {paths}, GET …/v1/models and GET …/v1{openapi.PATH}."
        )
        return await write_refusal(request, Refused(404, text, code="unknown_url"))

    def _whose(self, request: Request) -> tuple[RoleCalls, Answer]:
        """The calls that the address names, and who answers them."""
        self._check_token(request)
        named = request.path_params
        attempt = _number(named["attempt"])
        return self._calls_for(
            (named["rollout_id"], -1 if attempt is None else attempt), named["role"]
        )

    def _calls_for(self, key: tuple[str, int], role: str) -> tuple[RoleCalls, Answer]:
        """The calls of a role of an attempt, and who answers them: with what is set now."""
        rollout_id, attempt = key
        if role not in self._backends:
            text = f"Nobody answers the role {role!r}; there is: {', '.join(self._backends)}."
            raise Refused(404, text, code="no_role")
        if key in self._dismissed:
            raise Refused(410, f"{rollout_id}, attempt {attempt}, is over.", code="over")
        admitted = self._admitted.get(key)
        if admitted is None:
            text = f"{rollout_id}, attempt {attempt}, is not being played."
            raise Refused(404, text, code="not_admitted")
        calls = admitted.roles.get(role)
        if calls is None:
            calls = admitted.roles[role] = self._calls_of(*key, role, admitted)
        return calls, self._backends[role](admitted.example)

    def _calls_of(self, rollout_id: str, attempt: int, role: str, admitted: Admitted) -> RoleCalls:
        return RoleCalls(
            rollout_id,
            attempt,
            role,
            chat=self._chat,
            record=self._record,
            begin=self._begin,
            recorded=[one for one in admitted.recorded if one.place.role == role],
            failures=admitted.failures,
            max_calls=self._max_calls,
        )

    def _check_token(self, request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        given = given or request.headers.get("x-api-key", "")
        if not hmac.compare_digest(given.encode(), self._token):
            text = "The API key is not this run's; use the one the agent was started with."
            raise Refused(401, text, code="invalid_api_key")


def _number(text: str) -> int | None:
    """The number, if it is one that Python reads: beyond some thousand digits it does not."""
    return int(text) if text.isdecimal() and len(text) < 20 else None
