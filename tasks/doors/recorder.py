"""Recorder of a batch at a door: calls and ends become spans of the batch's journal."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from adapters.calls import Begun, Completion, RefusedCall
from adapters.door.batches import PlannedRollout
from adapters.door.role_calls import SAMPLER_REFUSED, SAMPLER_UNAVAILABLE
from adapters.errors import ServiceError
from adapters.player_protocol import PlaySettings, RolloutEnd
from adapters.rewards import Reward
from adapters.tinker.service import Lifeline, ServiceFailed, ServiceRefused
from tasks.recording.journal import Journal, read_journal
from tasks.recording.recorded_rollouts import recorded_calls
from tasks.recording.spans import (
    ERROR,
    LLM,
    REWARD,
    Span,
    begun_span,
    call_span,
    end_spans,
    refused_span,
    scored_names,
)
from tasks.storage.batch_plans import BatchPlan
from tasks.storage.names import is_judging, parse_batch
from tasks.storage.run_folder import RunFolder


class BatchState(NamedTuple):
    """State of a batch by its journal; `fault` is why the service answers no call of the batch.

    A batch is `stuck` if ends wait for an answer of the service before they are recorded.
    """

    finished: bool
    fault: ServiceError | None
    stuck: bool


@dataclass(frozen=True)
class BatchOrder:
    """Order of a batch to a door: its plan, its shard, and how it is played.

    `judged` rollouts need no reward from the agent.
    """

    plan: BatchPlan
    shard: Path
    settings: PlaySettings
    judged: bool


class JournalRecorder:
    """Recorder of a batch: what the door reports becomes spans in the batch's journal."""

    def __init__(
        self, run: RunFolder, lifeline: Lifeline, order: BatchOrder, journal: Journal
    ) -> None:
        plan = order.plan
        self._run = run
        self._lifeline = lifeline
        self._attempts = plan.attempts
        self._judges = is_judging(parse_batch(plan.name).split)
        self._unrewarded = order.judged or self._judges  # a judge may abstain
        self._journal = journal
        self._examples = dict(plan.examples(order.shard))
        self._left: dict[str, PlannedRollout] = {}
        self._answered = False
        self._held: list[RolloutEnd] = []
        self._fault: ServiceError | None = None
        self.plan()

    def state(self) -> BatchState:
        """Return how far the batch is; it is finished when every rollout has ended.

        Once the batch has a fault, nothing more of it is recorded.
        """
        return BatchState(not self._left, self._fault, bool(self._held))

    def plan(self) -> tuple[int, Sequence[PlannedRollout]]:
        """Read the journal: the next attempt's number, and the rollouts that have not ended.

        Raises TakenOver if the run has another owner by now.
        """
        self._run.check_owner()
        spans = read_journal(self._journal.path)
        rewarded = {span["rollout_id"] for span in spans if span["kind"] == REWARD}
        failures = Counter(span["rollout_id"] for span in spans if span["kind"] == ERROR)
        recorded = recorded_calls(spans)
        self._left = {
            name: PlannedRollout(name, row["example"], failures[name], recorded.get(name, ()))
            for name, row in self._examples.items()
            if name not in rewarded and failures[name] < self._attempts
        }
        self._answered |= any(span["kind"] == LLM for span in spans)
        attempt = max((span["attempt"] for span in spans), default=-1)
        return attempt + 1, [*self._left.values()]

    def begun(self, begun: Begun) -> None:
        self._journal.append_soon(self._of_run(begun_span(begun)))

    def refused(self, call: RefusedCall) -> None:
        self._journal.append_soon(self._of_run(refused_span(call)))

    async def answered(self, completion: Completion) -> None:
        """Record a call durably; ends that waited for the service to answer one count now."""
        await self._journal.append(self._of_run(call_span(completion)))
        self._answered |= completion.usage is None
        if self._answered:
            held, self._held = self._held, []
            for end in held:
                await self.ended(end)

    async def ended(self, end: RolloutEnd) -> None:
        """Record an end durably.

        EngineDied if the engine's death may be the cause of the end; TakenOver if the run has
        another owner by now.
        """
        self._run.check_owner()
        self._lifeline.check()
        if self._waits_for_service(end):
            return
        spans = self._end_spans(end, datetime.now(UTC))
        failures = self._left[end.rollout_id].failures + (spans[-1]["kind"] == ERROR)
        if spans[-1]["kind"] == REWARD or failures >= self._attempts:
            del self._left[end.rollout_id]
        *first, last = spans
        for span in first:
            self._journal.append_soon(self._of_run(span))
        await self._journal.append(self._of_run(last))

    def _waits_for_service(self, end: RolloutEnd) -> bool:
        """Return whether an end cannot be recorded yet; raise a ServiceError if it never can be.

        The service may have refused only this request: it has if it answers another one.
        """
        refused = end.unanswered
        if refused is None or (refused.kind == SAMPLER_REFUSED and self._answered):
            return False
        passing = refused.kind == SAMPLER_UNAVAILABLE
        self._fault = (ServiceFailed if passing else ServiceRefused)(
            f"{refused.message.rstrip('.')}. No end of {end.rollout_id} is recorded, which had "
            "asked it: look at the service and at the recipe's model, then resume the run"
        )
        if refused.kind != SAMPLER_REFUSED:
            raise self._fault
        self._held.append(end)
        return True

    def _end_spans(self, end: RolloutEnd, now: datetime) -> list[Span]:
        if self._judges and isinstance(end.outcome, Reward):
            rollouts = self._examples[end.rollout_id]["example"]["rollouts"]
            scored = scored_names((one["id"] for one in rollouts), end.outcome)
            end = replace(end, calls={**end.calls, **scored})
        spans = end_spans(end, now, judged=self._unrewarded)
        refused = {"calls_refused": end.refused} if end.refused else {}
        row = self._examples[end.rollout_id]
        played = {"example_id": row["example_id"], "example": row["example"]}
        spans[-1]["attributes"] = played | refused
        return spans

    def _of_run(self, span: Span) -> Span:
        return {"run_id": self._run.name, **span}
