"""The recorder of a rollout batch: what the door reports → spans in the batch's journal."""

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

from adapters.calls import Begun, Completion, RefusedCall
from adapters.door.batches import PlannedRollout, RolloutEnd
from adapters.door.call_sequence import SAMPLER_REFUSED, SAMPLER_UNAVAILABLE
from adapters.errors import ServiceError
from adapters.rewards import Reward
from adapters.tinker.faults import ServiceFailed, ServiceRefused
from tasks.playing.server import RolloutServer
from tasks.recording.journal import Journal, read_journal
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
    scored_names,
)
from tasks.shards import BatchPlan
from tasks.storage.names import is_judging, parse_batch


class JournalRecorder:
    """Recorder of a batch: what the door reports becomes spans in the batch's journal."""

    def __init__(
        self, server: RolloutServer, plan: BatchPlan, shard: Path, journal: Journal
    ) -> None:
        self._server = server
        self._attempts = plan.attempts
        self._judges = is_judging(parse_batch(plan.name).split)
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
        recorded = recorded_calls(spans)
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
        self._journal.append_soon(begun_span(begun, self._server.run.name))

    def refused(self, call: RefusedCall) -> None:
        self._journal.append_soon(refused_span(call, self._server.run.name))

    async def answered(self, completion: Completion) -> None:
        """Record a call durably; ends that waited for the service to answer one count now."""
        await self._journal.append(call_span(completion, self._server.run.name))
        self._answered |= completion.usage is None
        if self._answered:
            held, self._held = self._held, []
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
        calls = end.calls
        if self._judges and isinstance(end.outcome, Reward):
            rollouts = self._examples[end.rollout_id]["example"]["rollouts"]
            calls = {**calls, **scored_names((one["id"] for one in rollouts), end.outcome)}
        unrewarded = self._server.judged or self._judges  # a judge may abstain
        spans = end_spans(attempt, end.outcome, calls, judged=unrewarded)
        refused = {"calls_refused": end.refused} if end.refused else {}
        spans[-1]["attributes"] = self._attributes(end.rollout_id) | refused
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
