"""shard → rollouts: the agent, `group_size` times an example, played in batches and journalled.

What the door reports of a batch becomes spans in the batch's journal.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from ratchet.adapters.calls import Begun, Completion, RefusedCall
from ratchet.adapters.door.batches import DueRollout, OpenBatch, SampledBy
from ratchet.adapters.door.door import Door
from ratchet.adapters.door.role_calls import SAMPLER_REFUSED, SAMPLER_UNAVAILABLE
from ratchet.adapters.errors import ServiceError, UserError
from ratchet.adapters.player_protocol import PlaySettings, RolloutEnd
from ratchet.adapters.process.event_loop import run_in_lasting_loop
from ratchet.adapters.rewards import Reward
from ratchet.adapters.tinker.service import Lifeline, ServiceFailed, ServiceRefused
from ratchet.tasks.recording.journal import Journal, read_journal, seal
from ratchet.tasks.recording.recorded_rollouts import recorded_calls
from ratchet.tasks.recording.spans import (
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
from ratchet.tasks.storage.durability import durable
from ratchet.tasks.storage.files import verified
from ratchet.tasks.storage.names import ShardBatch, is_judging, parse_batch
from ratchet.tasks.storage.run_folder import RunFolder
from ratchet.tasks.storage.tables import query_beside, select

Play = Callable[[str, str, str], Awaitable[None]]
"""Plays a batch: the door's address, the batch's name, and the batch's token."""

QUERY = query_beside(__file__)


class RolloutHost:
    """Host of a run's rollouts: the door that answers the agents, and the lifeline behind it.

    `judged` rollouts need no reward from the agent.
    """

    def __init__(
        self,
        run: RunFolder,
        door: Door,
        lifeline: Lifeline,
        settings: PlaySettings,
        *,
        judged: bool = False,
    ) -> None:
        self.run = run
        self.lifeline = lifeline
        self.settings = settings
        self.judged = judged
        self._door = door
        self._cancels: set[Callable[[], None]] = set()
        self._cancelled = False

    def play(self, batch: OpenBatch, play: Play) -> None:
        """Open a batch at the door and have it played; EngineDied if the engine dies meanwhile."""
        run_in_lasting_loop(self._play_while_alive(batch, play))

    def cancel(self) -> None:
        """Cancel all batches, also those that begin later; journals keep what was recorded."""
        self._cancelled = True
        for cancel in list(self._cancels):
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
            what = f"the rollouts of {batch.name}"
            await self.lifeline.while_alive(self._play(batch, play), what)
        finally:
            self._cancels.discard(cancel)

    async def _play(self, batch: OpenBatch, play: Play) -> None:
        with self._door.opened(batch) as token:
            try:
                await play(self._door.address, batch.name, token)
            except Exception:
                await asyncio.wrap_future(self._door.supersede(batch))  # no sampled call is lost
                raise


class JournalRecorder:
    """Recorder of a batch: what the door reports becomes spans in the batch's journal.

    `judged` rollouts need no reward from the agent.
    """

    def __init__(
        self,
        run: RunFolder,
        lifeline: Lifeline,
        batch: ShardBatch,
        shard: Path,
        journal: Journal,
        *,
        judged: bool = False,
    ) -> None:
        self.fault: ServiceError | None = None
        """Why the service answers no call of the batch; then nothing more is recorded."""
        self._run = run
        self._lifeline = lifeline
        self._attempts, self._rewarded = batch.attempts, batch.rewarded
        self._judges = is_judging(parse_batch(batch.name).split)
        self._unrewarded = judged or self._judges  # a judge may abstain
        self._journal = journal
        self._examples = dict(batch.examples(shard))
        self._left: dict[str, DueRollout] = {}
        self._answered = False
        self._held: list[RolloutEnd] = []
        self.due()

    @property
    def finished(self) -> bool:
        """Whether every rollout has ended."""
        return not self._left

    @property
    def stuck(self) -> bool:
        """Whether ends wait for an answer of the service before they are recorded."""
        return bool(self._held)

    def due(self) -> tuple[int, Sequence[DueRollout]]:
        """Read the journal: the next attempt's number, and the rollouts that have not ended.

        Raises UserError if the run has another owner by now.
        """
        self._run.check_owner()
        spans = read_journal(self._journal.path)
        rewarded = {span["rollout_id"] for span in spans if span["kind"] == REWARD}
        failures = Counter(span["rollout_id"] for span in spans if span["kind"] == ERROR)
        recorded = recorded_calls(spans)
        self._left = {
            name: DueRollout(name, row["example"], failures[name], recorded.get(name, ()))
            for name, row in self._examples.items()
            if name not in rewarded and failures[name] < self._attempts
        }
        self._answered |= any(span["kind"] == LLM for span in spans)
        attempt = max((span["attempt"] for span in spans), default=-1)
        return attempt + 1, [*self._left.values()]

    def begun(self, begun: Begun) -> None:
        self._journal.append(self._of_run(begun_span(begun)))

    def refused(self, call: RefusedCall) -> None:
        self._journal.append(self._of_run(refused_span(call)))

    async def answered(self, completion: Completion) -> None:
        """Record a call durably; ends that waited for the service to answer one count now."""
        written = self._journal.append(self._of_run(call_span(completion)))
        await asyncio.shield(asyncio.wrap_future(written))  # what was handed over stays
        self._answered |= completion.usage is None
        if self._answered:
            held, self._held = self._held, []
            for end in held:
                await self.ended(end)

    async def ended(self, end: RolloutEnd) -> None:
        """Record an end durably.

        EngineDied if that may be its cause; UserError if the run has another owner.
        """
        self._run.check_owner()
        self._lifeline.check()
        if self._waits_for_service(end):
            return
        row = self._examples[end.rollout_id]
        if self._judges and isinstance(end.outcome, Reward):
            scored = scored_names((one["id"] for one in row["example"]["rollouts"]), end.outcome)
            end = replace(end, calls={**end.calls, **scored})
        spans = end_spans(end, datetime.now(UTC), self._rewarded, judged=self._unrewarded)
        spans[-1]["attributes"] = {"example_id": row["example_id"], "example": row["example"]} | (
            {"calls_refused": end.refused} if end.refused else {}
        )
        failures = self._left[end.rollout_id].failures + (spans[-1]["kind"] == ERROR)
        if spans[-1]["kind"] == REWARD or failures >= self._attempts:
            del self._left[end.rollout_id]
        *_, written = [self._journal.append(self._of_run(span)) for span in spans]
        await asyncio.shield(asyncio.wrap_future(written))

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

    def _of_run(self, span: Span) -> Span:
        return {"run_id": self._run.name, **span}


@durable
def collect_rollouts(
    path: Path,
    shard: Path,
    batch: ShardBatch,
    host: RolloutHost,
    sampled_by: Callable[[], SampledBy],
    play: Play,
) -> None:
    """Play what is left of a batch, and seal its journal into Parquet.

    UserError if the run has another owner by now.
    """
    run, lifeline = host.run, host.lifeline
    with Journal(run.journal(batch.name)) as journal:
        recorder = JournalRecorder(run, lifeline, batch, shard, journal, judged=host.judged)
        if not recorder.finished:
            opened = OpenBatch(batch.name, recorder, sampled_by(), host.settings)
            while not recorder.finished:
                try:
                    host.play(opened, play)
                except UserError as error:
                    lifeline.check()
                    raise recorder.fault or error from error
                if recorder.stuck and recorder.fault is not None:
                    raise recorder.fault
    seal(run.journal(batch.name), path)
    run.put()


def measure_yield(spans: Sequence[Path]) -> tuple[int, int]:
    """Count the groups of sealed batches whose rewards are not all equal, and the calls."""
    [row] = select(QUERY, spans=[verified(path) for path in spans]).to_pylist()
    return row["teaching_groups"], row["calls"]
