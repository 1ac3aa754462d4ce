"""The calls of one role of a rollout attempt: numbered as they arrive, each answered once."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from hashlib import sha256

from adapters.calls import Begun, Completion, Place, Refused, Request
from adapters.chat import Chat
from adapters.door.prefixes import Prefixes
from adapters.door.recorded import Answer, Begin, Memory, Record, Recorded
from adapters.errors import UserError

KEPT_ANSWERS = 16
"""Finished answers that can be given again to a client that lost them."""

UNRECORDED = (OSError, ValueError, RuntimeError, UserError)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Delivery:
    """How a request came: a digest of its body, which try it is, and whether its client has left.

    `retry` is the count that OpenAI's clients send, 0 for a first try; None where there is none.
    """

    digest: bytes
    retry: int | None
    gone: Callable[[], Awaitable[bool]]


@dataclass(slots=True)
class Asked:
    """A request under way, or answered a while ago."""

    call: int
    answering: asyncio.Task[Completion]
    delivery: Delivery

    @property
    def failed(self) -> bool:
        """Whether it ended without an answer."""
        task = self.answering
        return task.done() and (task.cancelled() or task.exception() is not None)


class RoleCalls:
    """All calls of one role of one rollout attempt. Lives on the door's event loop."""

    def __init__(
        self,
        rollout_id: str,
        attempt: int,
        role: str,
        *,
        chat: Chat,
        record: Record,
        begin: Begin | None = None,
        recorded: Iterable[Completion] = (),
        failures: int = 0,
        max_calls: int | None = None,
    ) -> None:
        self.refused = 0
        """Calls beyond `max_calls`."""
        self._whose = (rollout_id, attempt, role)
        self._failures = failures
        self._max_calls = max_calls
        self._record = record
        self._report = begin
        self._begun: set[int] = set()
        self._memory = Memory(Prefixes(chat), Recorded(recorded), self._has_begun)
        self._asked: dict[bytes, Asked] = {}
        self._running: set[asyncio.Task[Completion]] = set()
        self._calls = 0
        self._closed = False

    async def answers(
        self, request: Request, delivery: Delivery, answer: Answer
    ) -> list[Completion]:
        """As many answers as the request asks for, each of them a call with a seed of its own."""
        digests = [sha256(delivery.digest + bytes([n])).digest() for n in range(request.answers)]
        deliveries = [replace(delivery, digest=digest) for digest in digests]
        return await asyncio.gather(*(self.answer(request, one, answer) for one in deliveries))

    async def answer(self, request: Request, delivery: Delivery, answer: Answer) -> Completion:
        """The answer to a request: the one it already has, if it was asked before.

        It is made and recorded even if the client leaves meanwhile.
        """
        asked = self._asked.get(delivery.digest)
        if asked is None or not await _again(asked, delivery):
            asked = self._begin(request, delivery, answer, asked)
        asked.delivery = delivery
        return await asyncio.shield(asked.answering)

    async def finish(self) -> None:
        """Begin nothing more, and return when nothing is under way."""
        self._closed = True
        if self._running:
            await asyncio.wait(self._running)

    def _begin(
        self, request: Request, delivery: Delivery, answer: Answer, before: Asked | None
    ) -> Asked:
        """Answer it, under the number of its own failed try if there is one: the seed stays."""
        if self._closed:
            raise Refused(410, "The rollout attempt is over.", code="over")
        if before is not None and before.failed:
            call = before.call
        else:
            self._check_flood()
            call, self._calls = self._calls, self._calls + 1
        place = Place(*self._whose, call, self._failures)
        task = asyncio.create_task(self._answer(request, place, answer))
        self._running.add(task)
        task.add_done_callback(self._end)
        asked = self._asked[delivery.digest] = Asked(call, task, delivery)
        return asked

    def _check_flood(self) -> None:
        if self._max_calls is not None and self._calls >= self._max_calls:
            self.refused += 1
            text = (
                f"The rollout has made {self._calls} calls, which is all that it may make; "
                "the recipe's rollouts.max_calls says how many."
            )
            raise Refused(400, text, code="too_many_calls")

    def _end(self, task: asyncio.Task[Completion]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # seen: its client may have left, and asyncio would complain
        finished = [digest for digest, asked in self._asked.items() if asked.answering.done()]
        for digest in finished[:-KEPT_ANSWERS]:
            del self._asked[digest]

    def _has_begun(self, begun: Begun) -> None:
        """Report it once, however often it is tried."""
        if self._report is None or begun.place.call in self._begun:
            return
        self._begun.add(begun.place.call)
        try:
            self._report(begun)
        except UNRECORDED as error:
            raise _withheld(begun.place, error) from error

    async def _answer(self, request: Request, place: Place, answer: Answer) -> Completion:
        completion = await answer(request, place, self._memory)
        try:
            await self._record(completion)
        except UNRECORDED as error:
            raise _withheld(place, error) from error
        self._memory.prefixes.remember(
            request.messages,
            request.tools,
            completion.message,
            place.call,
            (completion.prompt_tokens, completion.sampled_tokens),
        )
        return completion


def _withheld(place: Place, error: Exception) -> Refused:
    log.error("the answer to %s could not be recorded", place, exc_info=error)
    text = f"The answer could not be recorded, so it is withheld ({error})."
    return Refused(500, text, code="not_recorded")


async def _again(asked: Asked, delivery: Delivery) -> bool:
    """Whether a request equal to an earlier one is that one, sent again.

    A counted retry is. A client that counts and says "first try" is an agent that wants a second
    opinion, unless the earlier one's client has left (its time was up). Where nobody counts, equal
    requests under way at the same time are taken for one.
    """
    if asked.failed:
        return False
    if delivery.retry:
        return True
    if asked.answering.done():
        return False
    return delivery.retry is None or await asked.delivery.gone()
