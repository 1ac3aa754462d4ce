"""shard → rollouts: the agent, `group_size` times an example, played in batches and journalled.

What the door reports of a batch becomes spans in the batch's journal. How the rollouts of a step
have ended says whether the step is trained.
"""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any, Self

from adapters.calls import Begun, Completion, RefusedCall
from adapters.door.batches import OpenBatch, PlannedRollout, SampledBy
from adapters.door.door import Door
from adapters.door.role_calls import SAMPLER_REFUSED, SAMPLER_UNAVAILABLE
from adapters.errors import ServiceError, UserError, counted
from adapters.player_protocol import PlaySettings, RolloutEnd
from adapters.process.event_loop import run_event_loop
from adapters.rewards import Reward
from adapters.tinker.service import Service, ServiceFailed, ServiceRefused
from tasks.recording.journal import Journal, read_journal, seal
from tasks.recording.recorded_rollouts import recorded_calls
from tasks.recording.spans import (
    CLOSED,
    ERROR,
    LLM,
    REWARD,
    Span,
    begun_span,
    call_span,
    cause_of,
    closed_span,
    end_spans,
    refused_span,
    scored_names,
)
from tasks.shards import BatchPlan
from tasks.storage.durability import durable
from tasks.storage.files import is_written, verified
from tasks.storage.names import BASELINE, is_judging, parse_batch, parse_rollout
from tasks.storage.run_folder import RunFolder
from tasks.storage.tables import query_beside, read_table, select

Play = Callable[[str, str, str], Awaitable[None]]
"""Plays a batch: the door's address, the batch's name, and the batch's token."""

QUERY = query_beside(__file__)

END_COLUMNS = ("rollout_id", "shard", "kind", "error_type", "error_message")
"""Columns of spans that say how rollouts have ended."""

ANSWERED_QUERY = """
select exists (from parquet_rows($spans) where len(response_token_ids) > 0) as answered
"""
"""Query of whether a policy has answered a call."""

CALLED_QUERY = """
select exists (from parquet_rows($spans) where kind = 'llm') as called
"""
"""Query of whether any model has answered a call."""

log = logging.getLogger(__name__)


class RolloutHost:
    """Host of a run's rollouts: the door that answers the agents, and the service behind it.

    `judged` rollouts need no reward from the agent.
    """

    def __init__(
        self,
        run: RunFolder,
        door: Door,
        service: Service,
        settings: PlaySettings,
        *,
        judged: bool = False,
    ) -> None:
        self.run = run
        self.door = door
        self.service = service
        self.settings = settings
        self.judged = judged
        self._cancels: set[Callable[[], None]] = set()
        self._cancelled = False

    def play(self, batch: OpenBatch, play: Play) -> None:
        """Have an open batch played; EngineDied if the engine dies meanwhile."""
        run_event_loop(self._play_while_alive(batch, play))

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

    def __init__(self, host: RolloutHost, plan: BatchPlan, shard: Path, journal: Journal) -> None:
        self._host = host
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
        """Why the service answers no call of the batch; nothing more of the batch is recorded."""
        self.plan()

    @property
    def finished(self) -> bool:
        """True when every rollout has ended or is left out."""
        return not self._left

    def plan(self) -> tuple[int, Sequence[PlannedRollout]]:
        """Read the journal: the next attempt's number, and the rollouts that have not ended.

        If a crash came before the end of a batch was recorded, a batch with enough ends is closed.
        Raises TakenOver if the run has another owner by now.
        """
        self._host.run.check_owner()
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
            closed = self._close(last, attempt, datetime.now(UTC))
            self._journal.append_now(self._of_run(closed))
        if self._closed:
            self._left = {}
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

    async def ended(self, end: RolloutEnd) -> bool:
        """Record an end durably, and return whether it closes the batch.

        An end that makes enough is recorded together with the decision that the rest is left out;
        no later end counts. EngineDied if the engine's death may be the cause of the end; raises
        TakenOver if the run has another owner by now.
        """
        self._host.run.check_owner()
        self._host.service.check()
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
            self._journal.append_soon(self._of_run(span))
        await self._journal.append(self._of_run(last))
        if closes:
            self._left = {}
        return closes

    def _waits_for_service(self, end: RolloutEnd) -> bool:
        """Return whether an end cannot be recorded yet; raise a ServiceError if it never can be.

        The service may have refused only this request: it has if it answers another one.
        """
        refused = end.unanswered
        if refused is None or (refused.kind == SAMPLER_REFUSED and self._answered):
            return False
        passing = refused.kind == SAMPLER_UNAVAILABLE
        self.fault = (ServiceFailed if passing else ServiceRefused)(
            f"{refused.message.rstrip('.')}. No end of {end.rollout_id} is recorded, which had "
            "asked it: look at the service and at the recipe's model, then resume the run"
        )
        if refused.kind != SAMPLER_REFUSED:
            raise self.fault
        self._held.append(end)
        return True

    def check_service(self) -> None:
        """Raise the ServiceError if the batch has ended without an answer of the service."""
        if self._held and self.fault is not None:
            raise self.fault

    def _end_spans(self, end: RolloutEnd, now: datetime) -> list[Span]:
        if self._judges and isinstance(end.outcome, Reward):
            rollouts = self._examples[end.rollout_id]["example"]["rollouts"]
            scored = scored_names((one["id"] for one in rollouts), end.outcome)
            end = replace(end, calls={**end.calls, **scored})
        unrewarded = self._host.judged or self._judges  # a judge may abstain
        spans = end_spans(end, now, judged=unrewarded)
        refused = {"calls_refused": end.refused} if end.refused else {}
        spans[-1]["attributes"] = self._attributes(end.rollout_id) | refused
        return spans

    def _has_quorum(self) -> bool:
        """Return whether the batch is to be closed now: enough have a reward, and some are left."""
        return not self._closed and bool(self._left) and len(self._rewarded) >= self._quorum

    def _close(self, rollout_id: str, attempt: int, now: datetime) -> Span:
        """Close the batch by the end of a rollout; return the record that makes it so."""
        self._closed = True
        left = {name: self._attributes(name) for name in self._left}
        return closed_span(rollout_id, attempt, now, left)

    def _of_run(self, span: Span) -> Span:
        return {"run_id": self._host.run.name, **span}

    def _attributes(self, rollout_id: str) -> dict[str, Any]:
        row = self._examples[rollout_id]
        return {"example_id": row["example_id"], "example": row["example"]}


@durable
def collect_rollouts(
    path: Path,
    shard: Path,
    plan: BatchPlan,
    host: RolloutHost,
    sampled_by: Callable[[], SampledBy],
    play: Play,
) -> None:
    """Play what is left of a batch, and seal its journal into Parquet."""
    with Journal(host.run.journal(plan.name)) as journal:
        recorder = JournalRecorder(host, plan, shard, journal)
        if not recorder.finished:
            batch = OpenBatch(plan.name, recorder, sampled_by(), host.settings)
            while not recorder.finished:
                try:
                    host.play(batch, play)
                except UserError as error:
                    raise recorder.fault or error from error
                recorder.check_service()
    seal(journal.path, path)


@dataclass(frozen=True)
class Yield:
    """Yield of rollouts: groups whose rewards are not all equal, and calls."""

    teaching_groups: int
    calls: int


def measure_yield(spans: Sequence[Path]) -> Yield:
    """Measure the yield of sealed batches."""
    (row,) = select(QUERY, spans=[verified(path) for path in spans]).to_pylist()
    return Yield(**row)


class StepStopped(UserError):
    """Stop at a step, or an evaluation, whose rollouts have too few rewards."""

    status = 1


@dataclass(frozen=True)
class Ends:
    """Ends of the rollouts of sealed batches: how many had no error, and the errors of the others.

    Baselines and stragglers do not count.
    """

    shard: str
    ended: int
    errors: Sequence[str]

    @classmethod
    def of(cls, spans: Sequence[Path]) -> Self:
        rows = [row for path in spans for row in read_table(path, END_COLUMNS).to_pylist()]
        played = [row for row in rows if parse_rollout(row["rollout_id"]).split != BASELINE]
        ended = {row["rollout_id"] for row in played if row["kind"] == REWARD}
        failed = {row["rollout_id"]: row for row in played if row["kind"] == ERROR}
        errors = [
            f"{row['error_type']}: {row['error_message']}"
            for rollout, row in failed.items()
            if rollout not in ended
        ]
        return cls(played[0]["shard"] if played else "the step", len(ended), errors)

    @property
    def failed(self) -> str:
        """Number of those that failed, in words."""
        rollouts = counted(self.ended + len(self.errors), "rollout")
        return f"{len(self.errors)} of the {rollouts} of {self.shard} failed"

    @property
    def commonest(self) -> str:
        """The commonest error, by its cause, in a sentence."""
        causes: dict[str, Counter[str]] = defaultdict(Counter)
        for error in self.errors:
            causes[cause_of(error)][error] += 1
        errors = max(causes.values(), key=Counter.total, default=Counter[str]())
        said = [f"{error} ({errors.total()} of them)" for error, _ in errors.most_common(1)]
        return f"The commonest error: {''.join(said) or 'none'}."


def check_rewards(spans: Sequence[Path], most_failed: float) -> None:
    """Raise StepStopped if no rollout of a step has a reward, or if too large a share failed.

    `spans` are the sealed batches of the step.
    """
    ends = Ends.of(spans)
    if ends.ended and len(ends.errors) <= most_failed * (ends.ended + len(ends.errors)):
        return
    raise StepStopped(
        f"{ends.failed}, and {ends.ended} earned a reward, so the run is stopped before this step "
        f"is trained. {ends.commonest} Mend the agent, or give a larger rollouts.most_failed, and "
        "resume the run: the step is played anew"
    )


def check_step(spans: Sequence[Path], most_failed: float) -> None:
    """Raise StepStopped if `check_rewards` does, or if no call of a step has been answered."""
    check_rewards(spans, most_failed)
    (row,) = select(ANSWERED_QUERY, spans=[verified(path) for path in spans]).to_pylist()
    if not row["answered"]:
        raise StepStopped(
            f"the rollouts of {spans[0].stem} have rewards, and none has a call that a policy "
            "answered, so the run is stopped before this step is trained. Have the agent ask the "
            "base_url that it is given, by the api_key, and resume the run: the step is played anew"
        )


def check_held_out(spans: Sequence[Path]) -> None:
    """Raise StepStopped if held-out rollouts have nothing to score; say how many failed.

    Rollouts have nothing to score if all have failed, or if no model has answered a call.
    """
    ends = Ends.of(spans)
    (row,) = select(CALLED_QUERY, spans=[verified(path) for path in spans]).to_pylist()
    if not ends.ended or not row["called"]:
        fact = (
            f"the rollouts of {ends.shard} have ended, and none has a call that a model answered"
            if ends.ended
            else f"{ends.failed}. {ends.commonest[:-1]}"
        )
        raise StepStopped(
            f"{fact}. So there is nothing to score, and no evaluation is recorded. Mend the agent, "
            "and resume the run, or repeat the command: these rollouts are played anew"
        )
    if ends.errors:
        log.warning("%s, and the evaluation is of the others. %s", ends.failed, ends.commonest)


def reopen_stopped(run: RunFolder, shard: str, check: Callable[[Sequence[Path]], None]) -> None:
    """Have the batches of a shard played anew if this check had stopped the run at its step."""
    batches = run.journalled(shard)
    spans = [run.spans(batch) for batch in batches]
    if not batches or not all(map(is_written, spans)):
        return
    try:
        check(spans)
    except StepStopped as stopped:
        log.warning("%s", stopped)
        for batch in batches:
            run.set_aside(batch)
