"""The door: an OpenAI-compatible proxy between the agents of a run and the models behind them.

Its address says whose call a request is. Each opening of a rollout batch has a token of its own,
which is the player's and opens the batch until it is closed. The calls of a rollout attempt are
opened by a key that is derived from the token.
"""

import asyncio
import hmac
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import TypeVar
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from ratchet.adapters.calls import POLICY, Begun, CallId, Completion, Policy, Refused, Sampling
from ratchet.adapters.calls import Request as ChatRequest
from ratchet.adapters.clients.litellm import PASSED_FIELDS
from ratchet.adapters.dialects.fields import NUMBER, Fields, bad_request
from ratchet.adapters.door.backends import Backend
from ratchet.adapters.door.batches import Attempt, NearDoor, OpenBatch
from ratchet.adapters.door.chat_api import (
    ChatApi,
    ServedModel,
    check_key,
    read_body,
    read_number,
    token_of,
)
from ratchet.adapters.door.policy_backend import PolicyBackend
from ratchet.adapters.door.role_calls import (
    Answer,
    CallSequence,
    Memory,
    RequestMeta,
    left_out_fields,
)
from ratchet.adapters.door.roles import CallsOf
from ratchet.adapters.harness.players_door import PlayersDoor
from ratchet.adapters.network.addresses import Listener
from ratchet.adapters.network.app_server import ANY_PORT
from ratchet.adapters.player_protocol import (
    BATCH,
    BEGIN,
    END,
    OVER,
    ROLE,
    WAITED,
    Record,
    RolloutEnd,
    WaitedTime,
    read_record,
    rollout_key,
    write_record,
)
from ratchet.adapters.rendering.chat import Chat

T = TypeVar("T")

API_PREFIX = "/v1"
"""Path of a door outside a run."""
WRONG_KEY = "The API key does not open this path; use the one the agent was started with."


class Door(ChatApi):
    """Proxy that answers for the open batches of a run, and for nothing else.

    `backends` says who answers each role beside `policy`: a backend, or a policy by its name. A
    call at the address of `policy` is of the first role, by its name, whose calls `sent` describes
    so. The recorder of a batch has completions, beginnings and ends before any answer leaves.
    """

    def __init__(
        self,
        chat: Chat,
        backends: Mapping[str, Backend | str],
        run_seed: int,
        max_calls: int | None = None,
        listener: Listener = ANY_PORT,
        sent: Sequence[CallsOf] = (),
    ) -> None:
        self.roles = {POLICY: POLICY, **backends}
        self._sent = sorted(sent, key=lambda calls: calls.role)
        self.run_seed = run_seed
        self._max_calls = max_calls
        self._secret = secrets.token_bytes(32)
        self._openings: Counter[str] = Counter()
        self._open: dict[str, OpenBatch] = {}
        super().__init__(chat, ROLE, listener)
        self.app.add_route(BATCH, self._look, methods=["GET"])
        self.app.add_route(BEGIN, self._begin, methods=["POST"])
        self.app.add_route(WAITED, self._waited, methods=["GET"])
        self.app.add_route(END, self._end, methods=["POST"])

    @contextmanager
    def opened(self, batch: OpenBatch) -> Iterator[str]:
        """Answer for a batch while the block runs; yield the batch's token of this opening."""
        self._openings[batch.name] += 1
        batch.begun = False
        self._open[batch.name] = batch
        try:
            yield self.token(batch.name)
        finally:
            del self._open[batch.name]
            self.supersede(batch)

    def near(
        self, _address: str, batch: str, token: str
    ) -> AbstractAsyncContextManager[PlayersDoor]:
        """Open the door for a batch to a player of the same process."""

        def find() -> OpenBatch:
            check_key(token, self.token(batch), WRONG_KEY)
            return self._opened(batch)

        return nullcontext(NearDoor(self.server.loop, find))

    def supersede(self, batch: OpenBatch) -> Future[None]:
        """End the attempts of a batch; the future is done when their calls are recorded."""
        return asyncio.run_coroutine_threadsafe(batch.supersede(), self.server.loop)

    def token(self, batch: str) -> str:
        """Return the token of a batch's latest opening: an HMAC by a secret of this door."""
        opening = f"{batch}/{self._openings[batch]}"
        return hmac.new(self._secret, opening.encode(), "sha256").hexdigest()

    def check_token(self, request: Request) -> None:
        """Refuse a request whose key does not open its path: a role's, or another of a batch."""
        match request.url.path.split("/"):
            case [_, "batch", batch, "rollout", rollout_id, "attempt", attempt, "role", *_]:
                expected = rollout_key(self.token(batch), rollout_id, attempt)
            case [_, "batch", batch, *_]:
                expected = self.token(batch)
            case _:
                expected = self.token("")  # which nobody has
        check_key(token_of(request), expected, WRONG_KEY)

    def find_model(self, request: Request) -> ServedModel:
        model = self._find_addressed(request)
        if model.name != POLICY or not self._sent:
            return model

        def by_content(asked: ChatRequest) -> ServedModel:
            fitting = (calls.role for calls in self._sent if calls.fit(asked, request.url.path))
            request.path_params["role"] = next(fitting, POLICY)  # the role of a refusal, too
            return self._find_addressed(request)

        return replace(model, passed=PASSED_FIELDS, by_content=by_content)

    def _find_addressed(self, request: Request) -> ServedModel:
        batch, attempt = self._find_attempt(request)
        role = request.path_params["role"]
        if role not in self.roles:
            text = f"Nobody answers the role {role!r}; there is: {', '.join(self.roles)}."
            raise Refused(404, text, code="no_role")
        calls = batch.calls(attempt, role, self.chat, self._max_calls)
        backend = self.find_answer(role, batch, attempt)

        async def answer(asked: ChatRequest, call: CallId, memory: Memory) -> Completion:
            completion = await backend(asked, call, memory)
            outcomes = await self.formats.outcomes(asked, completion.message)
            left_out = left_out_fields(self.chat, completion)
            return replace(completion, outcomes={**outcomes, **left_out})

        async def answer_all(asked: ChatRequest, meta: RequestMeta) -> list[Completion]:
            with attempt.waiting():
                return await calls.answer_all(asked, meta, answer)

        answered_by = batch.sampled_by.roles.get(role, self.roles[role])
        passed = () if isinstance(answered_by, str) else PASSED_FIELDS
        return ServedModel(role, answer_all, calls.order, passed)

    def note_refusal(self, request: Request, refused: Refused, started: datetime) -> None:
        """Record a refused call with its attempt, if that is being played."""
        with suppress(Refused):
            batch, attempt = self._find_attempt(request)
            batch.record_refusal(attempt, request.path_params["role"], refused, started)

    def find_answer(self, role: str, batch: OpenBatch, attempt: Attempt) -> Answer:
        sampled_by = batch.sampled_by
        backend = sampled_by.roles.get(role, self.roles[role])
        if not isinstance(backend, str):
            return backend(attempt.rollout.example)
        policy = sampled_by.policies[backend]
        seed = self.run_seed if sampled_by.seed is None else sampled_by.seed
        return PolicyBackend(self.chat, policy, sampled_by.sampling, seed).answer

    def _opened(self, name: str) -> OpenBatch:
        if name not in self._open:
            raise Refused(410, f"The batch {name} is not open.", code=OVER)
        return self._open[name]

    def _find_batch(self, request: Request) -> OpenBatch:
        self.check_token(request)
        return self._opened(request.path_params["batch"])

    def _find_attempt(self, request: Request) -> tuple[OpenBatch, Attempt]:
        batch = self._find_batch(request)
        number = read_number(request.path_params["attempt"])
        rollout = request.path_params["rollout_id"]
        return batch, batch.attempt(rollout, -1 if number is None else number)

    async def _look(self, request: Request) -> Response:
        self._find_batch(request)
        return Response()

    async def _begin(self, request: Request) -> Response:
        return _answer(await self._find_batch(request).begin())

    async def _waited(self, request: Request) -> Response:
        _, attempt = self._find_attempt(request)
        return _answer(WaitedTime(attempt.seconds_waited()))

    async def _end(self, request: Request) -> Response:
        batch, attempt = self._find_attempt(request)
        try:
            end = read_record(RolloutEnd, await read_body(request))
        except ValueError as error:
            raise bad_request(f"The end of a rollout cannot be read ({error}).") from error
        await batch.end(attempt.rollout.id, attempt.number, end)
        return Response()


def _answer(record: Record) -> Response:
    return Response(write_record(record), media_type="application/json")


class OpenDoor(ChatApi):
    """Endpoint of one policy outside a run, where nothing is recorded.

    Every call stands alone, with its messages rendered whole. The policy's version is the model's
    name; `defaults` samples for clients that name no numbers.
    """

    def __init__(
        self, chat: Chat, policy: Policy, defaults: Sampling, api_key: str, port: int = 0
    ) -> None:
        self._policy, self._defaults = policy, defaults
        self._api_key = api_key
        super().__init__(chat, API_PREFIX, Listener(port=port))

    def variables(self) -> dict[str, str]:
        """Return the environment variables that OpenAI's clients read."""
        return {
            "OPENAI_BASE_URL": self.address + API_PREFIX,
            "OPENAI_API_KEY": self._api_key,
            "OPENAI_MODEL": self._policy.version,
        }

    def check_token(self, request: Request) -> None:
        wrong = "The API key is not this endpoint's; use the one that was printed at its start."
        check_key(token_of(request), self._api_key, wrong)

    def find_model(self, request: Request) -> ServedModel:
        self.check_token(request)
        alone = CallSequence(CallId(uuid4().hex, 0, POLICY, 0), self.chat, _NoRecorder())
        return ServedModel(self._policy.version, partial(alone.answer_all, answer=self._sample))

    def note_refusal(self, *_: object) -> None:
        """Note nothing: there is no attempt to which a call belongs."""

    async def _sample(self, request: ChatRequest, call: CallId, memory: Memory) -> Completion:
        """Sample by the client's own numbers; equal requests with one seed get equal answers."""
        seed = request.fields.get("seed")
        seeded = call if seed is None else replace(call, rollout_id=f"seed-{seed}")
        sampling = choose_sampling(request.max_tokens, request.fields, self._defaults)
        backend = PolicyBackend(self.chat, self._policy, sampling, run_seed=0)
        completion = await backend.answer(request, seeded, memory)
        return replace(completion, response_id=call.response_id)


class _NoRecorder:
    """Recorder that keeps nothing."""

    def begun(self, begun: Begun) -> None:
        pass

    async def answered(self, completion: Completion) -> None:
        pass


def choose_sampling(
    max_tokens: int | None, fields: Mapping[str, object], defaults: Sampling
) -> Sampling:
    """Take the client's numbers over the defaults; null counts as absent."""
    sent = Fields(dict(fields))
    asked = {
        "max_tokens": max_tokens,
        "temperature": sent.read("temperature", NUMBER),
        "top_p": sent.read("top_p", NUMBER),
        "top_k": sent.read("top_k", int) or None,  # 0 is vLLM's for all
    }
    return replace(defaults, **{name: value for name, value in asked.items() if value is not None})
