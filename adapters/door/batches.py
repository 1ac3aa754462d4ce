"""A rollout batch at the door: its rollouts, its attempts, and who may speak for it.

A player asks the door what is to be played (`begin`) and tells it of every end (`end`). Each
`begin` is a new attempt at the batch and ends the authority of the attempt before it, so whoever
begins last speaks, and nothing that has ended is played again.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Protocol, TypeVar

from ratchet.adapters.calls import (
    CallId,
    Completion,
    Example,
    Policy,
    Refused,
    RefusedCall,
    Sampling,
)
from ratchet.adapters.door.role_calls import UNRECORDED_ERRORS, CallRecorder, CallSequence
from ratchet.adapters.errors import UserError
from ratchet.adapters.harness.players_door import BatchRefused
from ratchet.adapters.player_protocol import (
    NOT_BEGUN,
    NOT_RECORDED,
    OVER,
    BegunBatch,
    BegunRollout,
    Failure,
    PlaySettings,
    RolloutEnd,
    WaitedTime,
    copy_record,
    shorten_message,
)
from ratchet.adapters.process.clock import RunningClock, running_clock
from ratchet.adapters.rendering.chat import Chat

MOST_REFUSALS = 100
"""Refused calls of a role that an attempt records, since a client may repeat one for ever."""

T = TypeVar("T")
log = logging.getLogger(__name__)


class AttemptState(StrEnum):
    PLAYING = "playing"
    """Handed to a player; calls are answered."""
    ENDING = "ending"
    """The end was told; the last calls are being recorded, and new ones are refused."""
    REWARDED = "rewarded"
    FAILED = "failed"
    SUPERSEDED = "superseded"
    """A later attempt at the batch has begun."""


FINAL = frozenset(AttemptState) - {AttemptState.PLAYING, AttemptState.ENDING}
CHANGES: Mapping[AttemptState, Set[AttemptState]] = {
    AttemptState.PLAYING: {AttemptState.ENDING, AttemptState.SUPERSEDED},
    AttemptState.ENDING: FINAL,
    **dict.fromkeys(FINAL, frozenset()),
}
"""The legal changes of an attempt's state."""


@dataclass(frozen=True, slots=True)
class DueRollout:
    """A rollout that has not ended: its example, its past failures, its recorded calls."""

    id: str
    example: Example
    failures: int = 0
    recorded: Sequence[Completion] = ()


class BatchRecorder(CallRecorder, Protocol):
    """Recorder of a batch, which is the truth about what is left to play."""

    def refused(self, call: RefusedCall) -> None:
        """Record, without blocking, a call that was refused."""
        ...

    def due(self) -> tuple[int, Sequence[DueRollout]]:
        """Return the next attempt's number, and the rollouts that have not ended. It may block."""
        ...

    async def ended(self, end: RolloutEnd) -> None: ...


@dataclass(frozen=True)
class SampledBy:
    """Policies, by name, that answer a batch's calls, and how they are sampled.

    `roles` names backends that answer roles in place of policies. Without a `seed` the run's is
    sampled with.
    """

    policies: Mapping[str, Policy]
    sampling: Sampling
    roles: Mapping[str, str] = field(default_factory=dict[str, str])
    seed: int | None = None


@dataclass(eq=False)
class Attempt:
    """One attempt at a rollout, with the calls of each role."""

    rollout: DueRollout
    number: int
    state: AttemptState = AttemptState.PLAYING
    roles: dict[str, CallSequence] = field(default_factory=dict)
    refusals: Counter[str] = field(default_factory=Counter)
    """The recorded refused calls of each role."""
    ending: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the end is recorded."""
    _clock: RunningClock = field(default_factory=running_clock)
    _under_way: int = 0
    _since: float = 0.0
    _waited: float = 0.0

    def __post_init__(self) -> None:
        self._still_before = self._clock.stood_still()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the block as time in which the agent waits for an answer."""
        if not self._under_way:
            self._since = self._clock.seconds()
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._waited += self._clock.seconds() - self._since

    def seconds_waited(self) -> float:
        """Return for how long a call was being answered or this process stood still, up to now."""
        answering = self._clock.seconds() - self._since if self._under_way else 0.0
        still = self._clock.stood_still() - self._still_before
        return max(self._waited + answering + still, 0.0)  # rounding may take it below

    def change(self, state: AttemptState) -> None:
        """Change the state as CHANGES allows; Refused (410) if it does not."""
        if state not in CHANGES[self.state]:
            text = f"{self.rollout.id}, attempt {self.number}, is {self.state}."
            raise Refused(410, text, code=OVER)
        self.state = state

    async def finish_calls(self) -> None:
        """Refuse further calls, and wait until the calls under way are recorded."""
        await asyncio.gather(*(calls.finish() for calls in self.roles.values()))


class OpenBatch:
    """A batch that the door answers for. It lives on the door's event loop."""

    def __init__(
        self, name: str, recorder: BatchRecorder, sampled_by: SampledBy, settings: PlaySettings
    ) -> None:
        self.name = name
        self.sampled_by = sampled_by
        self.settings = settings
        self._recorder = recorder
        self.lost: set[str] = set()
        """Rollouts that were being played when a later attempt at the batch began. One of these
        rollouts may have ended the player, so each is played in a process of its own."""
        self.begun = False
        """Whether an attempt has begun since the flow opened the batch; the door resets it."""
        self._attempt = -1
        self._attempts: dict[str, Attempt] = {}
        self._superseded: set[Attempt] = set()
        self._beginning = asyncio.Lock()

    async def begin(self) -> BegunBatch:
        """Begin the next attempt at the rollouts that have not ended.

        Calls of earlier attempts are recorded first, so that no call is sampled twice. Refused
        (500) if the recorder cannot tell what is left.
        """
        async with self._beginning:
            if self.begun:
                self.lost.update(
                    attempt.rollout.id
                    for attempt in self._attempts.values()
                    if attempt.state is AttemptState.PLAYING
                )
            self.begun = True
            await self.supersede()
            try:
                due, rollouts = await asyncio.to_thread(self._recorder.due)
            except UserError as error:
                raise Refused(500, f"{self.name} cannot begin: {error}", code=NOT_BEGUN) from error
            self._attempt = max(self._attempt + 1, due)
            self._attempts = {rollout.id: Attempt(rollout, self._attempt) for rollout in rollouts}
            left = [BegunRollout(one.id, one.example, one.id in self.lost) for one in rollouts]
            return BegunBatch(self._attempt, left, self.settings)

    async def supersede(self) -> None:
        """Refuse the attempts under way, and wait until their calls and ends are recorded.

        Attempts that were superseded before, and still have calls under way, are waited for too.
        """
        for attempt in self._attempts.values():
            if attempt.state is AttemptState.PLAYING:
                attempt.change(AttemptState.SUPERSEDED)
        self._superseded.update(self._attempts.values())
        self._attempts = {}
        ended = {*self._superseded}
        await asyncio.gather(*(attempt.finish_calls() for attempt in ended))
        for attempt in ended:
            async with attempt.ending:
                pass
        self._superseded -= ended

    async def end(self, rollout_id: str, number: int, told: RolloutEnd) -> None:
        """Record an end once the last calls are recorded; Refused (500) if it cannot be."""
        attempt = self.attempt(rollout_id, number)
        attempt.change(AttemptState.ENDING)
        async with attempt.ending:
            await attempt.finish_calls()
            if self._attempts.get(rollout_id) is not attempt:
                attempt.change(AttemptState.SUPERSEDED)
            failed = isinstance(told.outcome, Failure)
            attempt.change(AttemptState.FAILED if failed else AttemptState.REWARDED)
            calls, none = attempt.roles, {role: [] for role in self.settings.roles}
            unanswered = (one for of_role in calls.values() for one in of_role.unanswered.values())
            end = replace(
                told,
                rollout_id=rollout_id,
                attempt=number,
                calls=none | {role: of_role.answered for role, of_role in calls.items()},
                refused=sum(of_role.refused for of_role in calls.values()),
                unanswered=next(unanswered, None),
            )
            try:
                await self._recorder.ended(end)
            except UNRECORDED_ERRORS as error:
                text = f"The end of {rollout_id} could not be recorded ({error})."
                raise Refused(500, text, code=NOT_RECORDED) from error

    def attempt(self, rollout_id: str, number: int) -> Attempt:
        """Return the attempt that is being played, or raise Refused (404, 410)."""
        attempt = self._attempts.get(rollout_id)
        if attempt is None or number > attempt.number:
            text = f"{rollout_id}, attempt {number}, is not being played."
            over = number <= self._attempt
            raise Refused(410 if over else 404, text, code=OVER if over else NOT_BEGUN)
        if number < attempt.number or attempt.state is not AttemptState.PLAYING:
            raise Refused(410, f"{rollout_id}, attempt {number}, is over.", code=OVER)
        return attempt

    def record_refusal(
        self, attempt: Attempt, role: str, refused: Refused, started: datetime
    ) -> None:
        """Record a refused call, up to MOST_REFUSALS of a role; it has no part in the numbers."""
        number = attempt.refusals[role]
        if number >= MOST_REFUSALS:
            return
        attempt.refusals[role] += 1
        rollout, code = attempt.rollout.id, refused.code or "refused"
        told, now = shorten_message(refused.message), datetime.now(UTC)
        try:
            self._recorder.refused(
                RefusedCall(
                    rollout, attempt.number, role, number, refused.status, code, told, started, now
                )
            )
        except UNRECORDED_ERRORS as error:
            log.error("a refused call of %s could not be recorded", rollout, exc_info=error)

    def calls(self, attempt: Attempt, role: str, chat: Chat, max_calls: int | None) -> CallSequence:
        """Return the calls of a role of an attempt, created at the role's first call."""
        calls = attempt.roles.get(role)
        if calls is None:
            rollout = attempt.rollout
            first = CallId(rollout.id, attempt.number, role, 0, rollout.failures)
            recorded = [call for call in rollout.recorded if call.id.role == role]
            calls = CallSequence(first, chat, self._recorder, recorded, max_calls)
            attempt.roles[role] = calls
        return calls


class NearDoor:
    """The door as a player of the same process asks it: by calls on the door's own event loop.

    What is told passes through the same records as by HTTP, so no player can change what it holds.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, find: Callable[[], OpenBatch]) -> None:
        self._loop, self._find = loop, find

    async def begin(self) -> BegunBatch:
        return copy_record(await self._ask(OpenBatch.begin))

    async def waited(self, rollout_id: str, attempt: int) -> WaitedTime:
        async def wait(batch: OpenBatch) -> WaitedTime:
            return WaitedTime(batch.attempt(rollout_id, attempt).seconds_waited())

        return await self._ask(wait)

    async def end(self, rollout_id: str, attempt: int, end: RolloutEnd) -> None:
        told = copy_record(end)
        await self._ask(lambda batch: batch.end(rollout_id, attempt, told))

    async def _ask(self, work: Callable[[OpenBatch], Awaitable[T]]) -> T:
        """Work on the door's loop, to the end even if the player leaves meanwhile."""

        async def ask() -> T:
            return await work(self._find())

        asked = asyncio.run_coroutine_threadsafe(ask(), self._loop)
        try:
            return await asyncio.shield(asyncio.wrap_future(asked))
        except Refused as refused:
            raise BatchRefused(refused.message) from refused
