"""shard → rollouts: the agent, `group_size` times an example, played in batches and journalled."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

from adapters.calls import Begun, Completion, RefusedCall
from adapters.door.batches import (
    OpenBatch,
    PlannedRollout,
    RolloutEnd,
    SampledBy,
)
from adapters.door.call_sequence import SAMPLER_REFUSED, SAMPLER_UNAVAILABLE
from adapters.door.door import Door
from adapters.errors import ServiceError, UserError
from adapters.player_protocol import PlaySettings
from adapters.tinker.faults import ServiceFailed, ServiceRefused
from adapters.tinker.service import Service
from tasks.recording.journal import Journal, read_journal, seal
from tasks.recording.recorded_calls import recorded_calls
from tasks.recording.spans import (
    CLOSED,
    ERROR,
    LLM,
    REWARD,
    EndedAttempt,
    Span,
    begun_span,
    call_span,
    closed_span,
    end_spans,
    refused_span,
)
from tasks.shards import ShardRow, read_shard
from tasks.storage.checksums import verified
from tasks.storage.durability import durable
from tasks.storage.files import is_written
from tasks.storage.names import BASELINE, batch_name, parse_rollout, rollout_name
from tasks.storage.run_folder import RunFolder
from tasks.storage.tables import query_beside, read, select

QUERY = query_beside(__file__)

ENDS = ("rollout_id", "shard", "kind", "error_type", "error_message")
"""Columns of spans that say how rollouts have ended."""

log = logging.getLogger(__name__)

Play = Callable[[str, str, str], Awaitable[None]]
"""Plays a batch: the door's address, the batch's name, and the batch's token."""


@dataclass(frozen=True)
class BatchPlan:
    """Plan of a batch: its part of a shard, each example `group_size` times.

    A rollout that fails is played again until it has been played `attempts` times. When the share
    `quorum` of the rollouts has a reward, the others are left out.
    """

    shard: str
    number: int
    group_size: int
    attempts: int = 1
    quorum: float = 1.0

    @property
    def name(self) -> str:
        """Name of the batch."""
        return batch_name(self.shard, self.number)

    def examples(self, shard: Path) -> list[tuple[str, ShardRow]]:
        """Return (rollout id, example) of every rollout of the batch."""
        return [
            (rollout_name(self.shard, place, index), row)
            for place, row in enumerate(read_shard(shard))
            if row["batch"] == self.number
            for index in range(self.group_size)
        ]


@dataclass(frozen=True)
class Yield:
    """Yield of rollouts: groups whose rewards are not all equal, calls, and sampled tokens."""

    teaching_groups: int
    calls: int
    tokens: int


def measure_yield(spans: Sequence[Path]) -> Yield:
    """Measure what sealed batches have yielded; replayed tokens do not count."""
    (row,) = select(QUERY, spans=[verified(path) for path in spans]).to_pylist()
    return Yield(**row)


class RolloutServer:
    """The run's side of its rollouts: the door that answers the agents, and the service behind it.

    With `replay`, an interrupted rollout gets the answers that its journal has already.
    """

    def __init__(
        self,
        run: RunFolder,
        door: Door,
        service: Service,
        settings: PlaySettings,
        replay: bool = True,
    ) -> None:
        self.run = run
        self.door = door
        self.service = service
        self.settings = settings
        self.replay = replay
        self._cancels: set[Callable[[], None]] = set()
        self._cancelled = False

    def play(self, batch: OpenBatch, play: Play) -> None:
        """Have an open batch played; EngineDied if the engine dies meanwhile."""
        asyncio.run(self._play_while_alive(batch, play))

    def cancel(self) -> None:
        """Cancel all batches, also those that begin later; journals keep what was recorded."""
        self._cancelled = True
        for cancel in list(self._cancels):
            with suppress(RuntimeError):  # the batch has ended, and closed its event loop
                cancel()

    async def _play_while_alive(self, batch: OpenBatch, play: Play) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def cancel() -> None:
            loop.call_soon_threadsafe(task.cancel)

        self._cancels.add(cancel)
        try:
            if self._cancelled:
                raise asyncio.CancelledError
            playing = self._play(batch, play)
            await self.service.while_alive(playing, f"the rollouts of {batch.name}")
        finally:
            self._cancels.discard(cancel)

    async def _play(self, batch: OpenBatch, play: Play) -> None:
        with self.door.opened(batch) as token:
            try:
                await play(self.door.address, batch.name, token)
            except Exception:
                await asyncio.wrap_future(self.door.settle(batch))  # no sampled call is lost
                raise


class JournalRecorder:
    """Recorder of a batch: what the door reports becomes spans in the batch's journal."""

    def __init__(
        self, server: RolloutServer, plan: BatchPlan, shard: Path, journal: Journal
    ) -> None:
        self._server = server
        self._attempts = plan.attempts
        self._journal = journal
        self._examples = dict(plan.examples(shard))
        # Exact: as a float, 0.14 * 100 is more than 14.
        self._quorum = Fraction(str(plan.quorum)) * len(self._examples)
        self._rewarded: set[str] = set()
        self._left: dict[str, PlannedRollout] = {}
        self._closed = False
        self._answered = False
        self._held: list[RolloutEnd] = []
        self.fault: ServiceError | None = None
        """Why the service answers no call of the batch, of which nothing more is recorded."""
        self.plan()

    @property
    def finished(self) -> bool:
        """True when every rollout has ended or is left out."""
        return not self._left

    def plan(self) -> tuple[int, Sequence[PlannedRollout]]:
        """Read the journal: the next attempt's number, and the rollouts that have not ended.

        A batch of which enough has ended is closed, if a crash came before that was recorded.
        Raises TakenOver if the run has another owner by now.
        """
        self._server.run.check_owner()
        spans = read_journal(self._journal.path)
        self._rewarded = {span["rollout_id"] for span in spans if span["kind"] == REWARD}
        failures = Counter(span["rollout_id"] for span in spans if span["kind"] == ERROR)
        recorded = recorded_calls(spans) if self._server.replay else {}
        self._left = {
            name: PlannedRollout(name, row["example"], failures[name], recorded.get(name, ()))
            for name, row in self._examples.items()
            if name not in self._rewarded and failures[name] < self._attempts
        }
        self._answered |= any(span["kind"] == LLM for span in spans)
        attempt = max((span["attempt"] for span in spans), default=-1)
        self._closed = any(span["kind"] == CLOSED for span in spans)
        if self._has_quorum():
            last = [span["rollout_id"] for span in spans if span["kind"] == REWARD][-1]
            self._journal.append_now(self._close(last, attempt, datetime.now(UTC)))
        if self._closed:
            self._left = {}
        return attempt + 1, [*self._left.values()]

    def begun(self, begun: Begun) -> None:
        """Record that a call is about to be sampled."""
        self._journal.append_soon(begun_span(begun, self._server.run.name))

    def refused(self, call: RefusedCall) -> None:
        """Record a call that was refused."""
        self._journal.append_soon(refused_span(call, self._server.run.name))

    async def answered(self, completion: Completion) -> None:
        """Record a call durably; ends that waited for the service to answer one count now."""
        await self._journal.append(call_span(completion, self._server.run.name))
        self._answered |= completion.usage is None
        held, self._held = self._held if self._answered else [], []
        for end in held:
            await self.ended(end)

    async def ended(self, end: RolloutEnd) -> bool:
        """Record an end durably, and return whether it closes the batch.

        An end that makes enough is recorded together with the decision that the rest is left out;
        no later end counts. EngineDied if the engine's death may be the cause of the end; raises
        TakenOver if the run has another owner by now.
        """
        self._server.run.check_owner()
        self._server.service.check()
        if self._closed or self._waits_for_service(end):
            return False
        now = datetime.now(UTC)
        spans = self._end_spans(end, now)
        failures = self._left[end.rollout_id].failures + (spans[-1]["kind"] == ERROR)
        if spans[-1]["kind"] == REWARD:
            self._rewarded.add(end.rollout_id)
        if spans[-1]["kind"] == REWARD or failures >= self._attempts:
            del self._left[end.rollout_id]
        closes = self._has_quorum()
        if closes:
            spans.append(self._close(end.rollout_id, end.attempt, now))
        *first, last = spans
        for span in first:
            self._journal.append_soon(span)
        await self._journal.append(last)
        if closes:
            self._left = {}
        return closes

    def _waits_for_service(self, end: RolloutEnd) -> bool:
        """Return whether an end cannot be recorded yet; raise a ServiceError if it never can be.

        The service may have refused one request alone. That is known once it has answered another.
        """
        refused = end.unanswered
        if refused is None or (refused.code == SAMPLER_REFUSED and self._answered):
            return False
        passing = refused.code == SAMPLER_UNAVAILABLE
        self.fault = (ServiceFailed if passing else ServiceRefused)(
            f"{refused.message.rstrip('.')}. No end of {end.rollout_id} is recorded, which had "
            "asked it: look at the service and at the recipe's model, then resume the run"
        )
        if refused.code != SAMPLER_REFUSED:
            raise self.fault
        self._held.append(end)
        return True

    def check_service(self) -> None:
        """Raise the ServiceError if the batch has ended without an answer of the service."""
        if self._held and self.fault is not None:
            raise self.fault

    def _end_spans(self, end: RolloutEnd, now: datetime) -> list[Span]:
        started = now - timedelta(seconds=end.seconds)
        attempt = EndedAttempt(end.rollout_id, end.attempt, started, now, self._server.run.name)
        spans = end_spans(attempt, end.outcome, end.calls)
        spans[-1]["attributes"] = self._attributes(end.rollout_id)
        if end.refused:
            spans[-1]["attributes"]["calls_refused"] = end.refused
        return spans

    def _has_quorum(self) -> bool:
        """Return whether the batch is to be closed now: enough have a reward, and some are left."""
        return not self._closed and bool(self._left) and len(self._rewarded) >= self._quorum

    def _close(self, rollout_id: str, attempt: int, now: datetime) -> Span:
        """Close the batch by the end of a rollout; return the record that makes it so."""
        self._closed = True
        end = EndedAttempt(rollout_id, attempt, now, now, self._server.run.name)
        return closed_span(end, {name: self._attributes(name) for name in self._left})

    def _attributes(self, rollout_id: str) -> dict[str, Any]:
        row = self._examples[rollout_id]
        return {"example_id": row["example_id"], "example": row["example"]}


def write_spans(
    path: Path,
    shard: Path,
    plan: BatchPlan,
    server: RolloutServer,
    sampled_by: Callable[[], SampledBy],
    play: Play,
) -> None:
    """Play what is left of a batch, and seal its journal into Parquet."""
    with Journal(server.run.journal(plan.name)) as journal:
        recorder = JournalRecorder(server, plan, shard, journal)
        if not recorder.finished:
            batch = OpenBatch(plan.name, recorder, sampled_by(), server.settings)
            while not recorder.finished:
                try:
                    server.play(batch, play)
                except UserError as error:
                    raise recorder.fault or error from error
                recorder.check_service()
    seal(journal.path, path)


collect_rollouts = durable("collect_rollouts", write_spans)
"""shard → rollouts → spans, of one batch."""


class StepStopped(UserError):
    """Stop of a run at a step of which too few rollouts have a reward."""

    status = 1


def check_rewards(spans: Sequence[Path], most_failed: float) -> None:
    """Raise StepStopped if no rollout of a step has a reward, or a larger share than this failed.

    `spans` are the sealed batches of the step. Baselines and stragglers do not count.
    """
    rows = [row for path in spans for row in read(path, ENDS).to_pylist()]
    played = [row for row in rows if parse_rollout(row["rollout_id"]).split != BASELINE]
    rewarded = {row["rollout_id"] for row in played if row["kind"] == REWARD}
    errors = {row["rollout_id"]: row for row in played if row["kind"] == ERROR}
    failed = [row for rollout, row in errors.items() if rollout not in rewarded]
    if rewarded and len(failed) <= most_failed * (len(rewarded) + len(failed)):
        return
    said = Counter(f"{row['error_type']}: {row['error_message']}" for row in failed)
    commonest = "; ".join(f"{error} ({count} times)" for error, count in said.most_common(1))
    shard, *_ = (row["shard"] for row in played) if played else ("the step",)
    raise StepStopped(
        f"{len(failed)} of the {len(rewarded) + len(failed)} rollouts of {shard} failed, and "
        f"{len(rewarded)} have a reward, so the run is stopped before this step is trained. The "
        f"commonest error: {commonest or 'none'}. Mend the agent, or give a larger "
        "rollouts.most_failed, and resume the run: the step is played anew"
    )


def reopen_stopped(run: RunFolder, shard: str, most_failed: float) -> None:
    """Have the batches of a shard played anew if the run was stopped at its step."""
    batches = run.journalled(shard)
    spans = [run.spans(batch) for batch in batches]
    if not batches or not all(map(is_written, spans)):
        return
    try:
        check_rewards(spans, most_failed)
    except StepStopped as stopped:
        log.warning("%s", stopped)
        for batch in batches:
            run.set_aside(batch)
