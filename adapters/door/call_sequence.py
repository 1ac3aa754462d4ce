"""The calls of one role of a rollout attempt: numbered as they arrive, each answered once."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Protocol

from adapters.calls import Begun, CallId, Completion, Refused, Request
from adapters.door.kept_calls import KeptCalls
from adapters.door.memory import Answer, Memory
from adapters.errors import UserError, counted
from adapters.player_protocol import Failure
from adapters.process.event_loop import cancel_and_wait
from adapters.rendering.chat import Chat

KEPT_ANSWERS = 16
"""Finished answers that are kept for clients that lost them."""

UNRECORDED = (OSError, ValueError, RuntimeError, UserError)

SAMPLER_REFUSED = "sampler_refused"
"""Code of a call that the service refuses, as it may refuse this one request only."""
SAMPLER_FORBIDDEN = "sampler_forbidden"
"""Code of a call that the service refuses, as it refuses every call of this run."""
SAMPLER_UNAVAILABLE = "sampler_unavailable"
"""Code of a call that the service did not answer, and may answer later."""
BY_SERVICE = (SAMPLER_REFUSED, SAMPLER_FORBIDDEN, SAMPLER_UNAVAILABLE)

log = logging.getLogger(__name__)


class CallRecorder(Protocol):
    def begun(self, begun: Begun) -> None:
        """Record, without blocking, that a call is about to be sampled."""
        ...

    async def answered(self, completion: Completion) -> None:
        """Record a completion durably; the answer leaves when this returns."""
        ...


@dataclass(frozen=True, slots=True)
class RequestMeta:
    """Delivery of a request: the digest of its body, its retry count, whether its client has left.

    `retry` is the count that OpenAI's clients send, 0 for a first try; None if there is none.
    """

    digest: bytes
    retry: int | None
    gone: Callable[[], Awaitable[bool]]


@dataclass(slots=True)
class PendingRequest:
    """A request that is being answered, or was answered a while ago."""

    call: CallId
    answering: asyncio.Task[Completion]
    meta: RequestMeta

    @property
    def failed(self) -> bool:
        """Whether the request ended without an answer."""
        task = self.answering
        return task.done() and (task.cancelled() or task.exception() is not None)


class CallSequence:
    """All calls of one role of one rollout attempt. It lives on the door's event loop.

    `first` is the role's first call. `recorded` are the role's calls that earlier
    attempts answered; `max_calls` bounds the calls of this attempt.
    """

    def __init__(
        self,
        first: CallId,
        chat: Chat,
        recorder: CallRecorder,
        recorded: Iterable[Completion] = (),
        max_calls: int | None = None,
    ) -> None:
        self.refused = 0
        """Calls that were refused because they exceeded `max_calls`."""
        self.answered: list[int] = []
        """Numbers of the calls that were answered and recorded."""
        self.unanswered: dict[int, Failure] = {}
        """Calls that the service has not answered, by their numbers."""
        self.order = asyncio.Lock()
        """Lock under which the requests are read, so that they are numbered as they come."""
        self._first = first
        self._max_calls = max_calls
        self._recorder = recorder
        self._begun: set[int] = set()
        self._memory = Memory(KeptCalls(chat), self._record_begun, recorded)
        self._requests: dict[bytes, PendingRequest] = {}
        self._running: set[asyncio.Task[Completion]] = set()
        self._calls = 0
        self._closed = False

    async def answer_all(
        self, request: Request, meta: RequestMeta, answer: Answer
    ) -> list[Completion]:
        """Answer a request as often as it asks; each answer is a call with a seed of its own."""
        digests = (sha256(meta.digest + bytes([n])).digest() for n in range(request.answers))
        metas = (replace(meta, digest=digest) for digest in digests)
        return await asyncio.gather(*(self._answer_once(request, one, answer) for one in metas))

    async def finish(self) -> None:
        """Refuse further calls, and return when none is being answered."""
        self._closed = True
        if self._running:
            await asyncio.wait(self._running)

    async def cancel(self) -> None:
        """Refuse further calls, and cancel those that are being answered, which are lost."""
        self._closed = True
        await cancel_and_wait(*self._running)

    async def _answer_once(self, request: Request, meta: RequestMeta, answer: Answer) -> Completion:
        """Answer a request, or give the answer it already has if it was sent before.

        The answer is made and recorded even if the client leaves meanwhile.
        """
        pending = self._requests.get(meta.digest)
        if pending is None or not await _is_resent(pending, meta):
            pending = self._begin(request, meta, answer, pending)
        pending.meta = meta
        try:
            return await asyncio.shield(pending.answering)
        except asyncio.CancelledError:
            if not pending.answering.cancelled():
                raise
            raise Refused(410, "The rollout attempt is over.", code="over") from None

    def _begin(
        self, request: Request, meta: RequestMeta, answer: Answer, before: PendingRequest | None
    ) -> PendingRequest:
        """Begin to answer. A retry of a failed request keeps its number, and so its seed."""
        if self._closed:
            raise Refused(410, "The rollout attempt is over.", code="over")
        if before is not None and before.failed:
            call = before.call
        elif self._max_calls is not None and self._calls >= self._max_calls:
            self.refused += 1
            text = (
                f"The rollout has made {counted(self._calls, 'call')}, which is all that it may "
                "make; the recipe's rollouts.max_calls says how many."
            )
            raise Refused(400, text, code="too_many_calls")
        else:
            call = replace(self._first, number=self._calls)
            self._calls += 1
        task = asyncio.create_task(self._answer(request, call, answer))
        self._running.add(task)
        task.add_done_callback(self._end)
        pending = self._requests[meta.digest] = PendingRequest(call, task, meta)
        return pending

    def _end(self, task: asyncio.Task[Completion]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved: the client may have left, and asyncio would complain
        finished = [digest for digest, asked in self._requests.items() if asked.answering.done()]
        for digest in finished[:-KEPT_ANSWERS]:
            del self._requests[digest]

    def _record_begun(self, begun: Begun) -> None:
        """Record a call as begun once, however often it is tried."""
        if begun.id.number in self._begun:
            return
        self._begun.add(begun.id.number)
        try:
            self._recorder.begun(begun)
        except UNRECORDED as error:
            raise _withhold(begun.id, error) from error

    async def _answer(self, request: Request, call: CallId, answer: Answer) -> Completion:
        try:
            completion = await answer(request, call, self._memory)
        except Refused as refused:
            if refused.code is not None and refused.code in BY_SERVICE:
                self.unanswered[call.number] = Failure(refused.code, refused.message)
            raise
        self.unanswered.pop(call.number, None)
        try:
            await self._recorder.answered(completion)
        except UNRECORDED as error:
            raise _withhold(call, error) from error
        self.answered.append(call.number)
        self._memory.kept.remember(completion)
        return completion


def _withhold(call: CallId, error: Exception) -> Refused:
    log.error("the answer to %s could not be recorded", call, exc_info=error)
    text = f"The answer could not be recorded, so it is withheld ({error})."
    return Refused(500, text, code="not_recorded")


async def _is_resent(pending: PendingRequest, meta: RequestMeta) -> bool:
    """Return whether a request equal to an earlier one is that request, sent again.

    A counted retry is. A client that counts retries and sends a first try is an agent that wants a
    second answer, unless the client of the earlier request has left (it timed out). Clients that
    do not count are taken to resend while the earlier request is still being answered.
    """
    if pending.failed:
        return False
    if meta.retry:
        return True
    if pending.answering.done():
        return False
    return meta.retry is None or await pending.meta.gone()
