"""The steps of a run, whose rollouts are sampled while earlier steps are trained.

Whoever iterates over the steps trains a step before it asks for the next one, so checkpoint s is
there when step s is asked for.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, islice
from pathlib import Path
from threading import Event
from typing import Any

from flows.recipe.recipe import Recipe
from flows.runtime.open_rollouts import (
    CheckpointAtBegin,
    RolloutRunner,
    Spans,
    training_groups,
    wait_for_batches,
)
from flows.runtime.open_run import OpenRun
from tasks.datums import datums_of_batch
from tasks.rollouts import StepStopped, measure_yield
from tasks.settings.algorithm import CreditAssignment
from tasks.settings.rollouts import Rollouts
from tasks.shards import ShardSize, draw_shard
from tasks.storage.arrivals import ArrivalLedger
from tasks.storage.names import parse_batch, shard_name
from tasks.storage.run_folder import RunFolder

Submit = Callable[[int, int | CheckpointAtBegin, int], Mapping[str, Spans]]
"""Submits the batches of (step, checkpoint, round): one round of the step's own shard."""

Steps = Iterator[tuple[int, Sequence[Spans], Sequence[Spans]]]
"""Steps, each with the batches on which it is trained, and those of the next step if it has begun.
"""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Following:
    """Rollouts of the next step, which has begun while an earlier one is trained.

    `check` raises StepStopped if they have too few rewards.
    """

    batches: Sequence[Spans]
    check: Callable[[Sequence[Path]], None]

    def pending(self) -> list[Future[Any]]:
        """Return what has not ended."""
        played = [batch.wrapped_future for batch in self.batches]
        return [future for future in played if not future.done()]

    def ended_spans(self) -> list[Path] | None:
        """Return the sealed spans if all have ended well, without waiting.

        An error of the step is raised when its turn comes.
        """
        if self.pending():
            return None
        for batch in self.batches:
            batch.wait()
            if not batch.state.is_completed():
                return None
        spans = [batch.result() for batch in self.batches]
        try:
            self.check(spans)
        except StepStopped:
            return None
        return spans


@dataclass(frozen=True)
class PlayedStep:
    """A step whose rollouts have ended, with their sealed spans.

    `following` is there if what the next step is trained on does not depend on the update of this
    one. `draw_next` draws the next shard that is submitted, if there is one.
    """

    step: int
    spans: Sequence[Path]
    following: Following | None = None
    draw_next: Callable[[], object] | None = None


def play_steps(
    run: OpenRun, recipe: Recipe, runner: RolloutRunner, draw: Callable[[int], Path]
) -> Iterator[PlayedStep]:
    """Yield the steps that are left, in the order that the recipe gives.

    Each step plays the shard that `draw` returns for it. If the rollouts stream, the
    forward-backward pass of each batch is submitted when the batch has ended, in their order.
    StepStopped ends a run if a step has too few rewards, or no answer of a policy.
    """
    rollouts, groups, draw = recipe.rollouts, training_groups(recipe), cache(draw)
    # A judge may be the policy, and the weights of a client that is a step ahead are not in-flight.
    alone = rollouts.weights == "inflight" or recipe.judge.judges

    def submit(step: int, checkpoint: int | CheckpointAtBegin, number: int) -> Mapping[str, Spans]:
        return runner.submit_shard(draw(step), checkpoint, groups, number)

    for reason in rollouts.not_reproducible():
        log.warning("%s", reason)
    if rollouts.order == "arrival":
        steps = steps_by_arrival(run, rollouts, submit)
    else:
        steps = steps_by_shard(run.steps_left(), rollouts.lag, submit)
        if rollouts.rounds > 1:
            steps = sample_on(steps, rollouts, submit, recipe.algorithm.trained_calls)
    for step, batches, following in steps:
        for batch in batches if rollouts.stream else ():
            batch.wait()
            if not batch.state.is_completed():
                break
            accumulate(run, step, batch.result(), recipe.credit())
        ahead = Following(following, runner.check) if following and not alone else None
        spans, later = runner.wait_for(batches), step + rollouts.lag + 1
        draw_next = partial(_draw_before, run.end, draw, later) if later < run.end() else None
        yield PlayedStep(step, spans, ahead, draw_next)


def _draw_before(end: Callable[[], int], draw: Callable[[int], Path], step: int) -> None:
    """Draw the shard of a step, unless the run turned out to end before it."""
    if step < end():
        draw(step)


def accumulate(run: OpenRun, step: int, spans: Path, credit: CreditAssignment) -> None:
    """Submit the forward-backward pass of a rollout batch, before the step's other batches end."""
    for policy in run.policies:
        datums = datums_of_batch(spans, policy.roles, credit)
        if datums.num_rows:
            policy.updater.accumulate(step, datums)


def steps_by_shard(steps: Iterable[int], lag: int, submit: Submit) -> Steps:
    """Yield each step with its own shard's batches, sampled by checkpoint max(step - `lag`, 0)."""
    submitted, left = deque[Mapping[str, Spans]](), iter(steps)
    for step in steps:
        for ahead in islice(left, lag + 1 - len(submitted)):
            submitted.append(submit(ahead, max(ahead - lag, 0), 0))
        batches = submitted.popleft()
        yield step, [*batches.values()], [*submitted[0].values()] if submitted else []


def sample_on(steps: Steps, rollouts: Rollouts, submit: Submit, trained_calls: int | None) -> Steps:
    """Yield each step with further rounds of its shard, until enough of its groups teach.

    A group teaches if its rewards are not all equal (dynamic sampling: Yu et al., 2025,
    arXiv:2503.14476). A round is played while fewer than `rollouts.groups` teach or, with
    `trained_calls`, while the step has fewer calls. The rounds depend on recorded rewards alone, so
    a run that continues plays the same rounds.
    """
    for step, first, _ in steps:
        batches, checkpoint = [*first], max(step - rollouts.lag, 0)
        for number in range(1, rollouts.rounds):
            yielded = measure_yield(wait_for_batches(batches))
            teaches = yielded.teaching_groups >= rollouts.groups
            if teaches if trained_calls is None else yielded.calls >= trained_calls:
                break
            batches += submit(step, checkpoint, number).values()
        yield step, batches, []


def steps_by_arrival(run: OpenRun, rollouts: Rollouts, submit: Submit) -> Steps:
    """Yield each step with the first batches that have ended, at most `lag` updates behind.

    A batch is sampled by the newest checkpoint when it begins. What samples a batch and what makes
    a step is recorded before it counts, so a run that continues keeps each decision.
    """
    steps, lag = run.steps_left(), rollouts.lag
    ledger = ArrivalLedger(run.folder.arrivals, run.folder.ownership)
    size = min(rollouts.batches, rollouts.groups)
    arrivals = Arrivals(ledger, size, run.policies.last_step)
    shard = arrivals.first_shard(steps.start)
    for step in steps:
        while shard <= step + lag and shard < run.end():
            arrivals.add(submit(shard, arrivals.checkpoint, 0), step)
            shard += 1
        yield step, arrivals.take(step, lag), []


class Arrivals:
    """Batches that belong to no step yet, in the order of their submission."""

    def __init__(self, ledger: ArrivalLedger, size: int, newest: Callable[[], int]) -> None:
        self.ledger = ledger
        self._newest = newest
        self._size = size
        self._waiting: dict[str, Spans] = {}
        self._ended: set[str] = set()
        self._news = Event()

    def checkpoint(self, batch: str) -> int:
        """Return the checkpoint that samples a batch: the recorded one, else the newest."""
        return self.ledger.begin(batch, self._newest)

    def first_shard(self, step: int) -> int:
        """Return the first shard with batches that no step before `step` has taken."""
        made = self.ledger.steps()
        earlier = chain.from_iterable(made[s] for s in made if s < step)
        taken = Counter(parse_batch(batch).shard for batch in earlier)
        names = (shard_name("train", shard) for shard in range(step))
        return next((s for s, name in enumerate(names) if taken[name] < self._size), step)

    def add(self, batches: Mapping[str, Spans], step: int) -> None:
        """Add submitted batches, except batches that a step before `step` has taken."""
        for name, spans in batches.items():
            taker = self.ledger.taker(name)
            if taker is None or taker >= step:
                self._waiting[name] = spans
                spans.add_done_callback(partial(self._end, name))

    def take(self, step: int, lag: int) -> Sequence[Spans]:
        """Take the batches of a step: the recorded ones, or else the first to have ended."""
        chosen = self.ledger.batches(step)
        if chosen is None:
            chosen = self._wait_for(step, lag)
            self.ledger.make(step, chosen)
        return [self._waiting.pop(name) for name in chosen]

    def _wait_for(self, step: int, lag: int) -> list[str]:
        while True:
            self._news.clear()
            over, begun = self._ended & self._waiting.keys(), self.ledger.checkpoint
            wait_for_batches(self._waiting[name] for name in over)
            waiting = [WaitingBatch(n, begun(n), n in over) for n in self._waiting]
            chosen = choose_batches(waiting, step, lag, self._size)
            if chosen is not None:
                return chosen
            self._news.wait()

    def _end(self, name: str, _: object) -> None:
        self._ended.add(name)
        self._news.set()


@dataclass(frozen=True)
class WaitingBatch:
    """A batch that belongs to no step yet; its `checkpoint` is None until it begins."""

    name: str
    checkpoint: int | None
    ended: bool


def choose_batches(
    waiting: Sequence[WaitingBatch], step: int, lag: int, size: int
) -> list[str] | None:
    """Choose the `size` batches of a step among those that have ended; None if it must wait.

    `waiting` is in the order of submission. Batches of the oldest checkpoints are taken first. A
    batch is due `lag` steps after its checkpoint. A step waits while its choice would make another
    batch later than due.
    """
    ended = sorted(
        (batch for batch in waiting if batch.ended), key=lambda batch: batch.checkpoint or 0
    )
    chosen = [batch.name for batch in ended[:size]]
    due = [
        lag + (step if batch.checkpoint is None else batch.checkpoint)
        for batch in waiting
        if batch.name not in chosen
    ]
    in_time = all(
        sum(of_batch <= later for of_batch in due) <= (later - step) * size
        for later in range(step, step + lag + 1)
    )
    return chosen if len(chosen) == size and in_time else None


def draw_train_shard(recipe: Recipe, run: RunFolder, step: int) -> Path:
    """Draw the examples that a training step plays."""
    rollouts, path = recipe.rollouts, run.shard(shard_name("train", step))
    size = ShardSize(rollouts.groups, rollouts.batches, rollouts.rounds)
    return draw_shard(path, recipe.train_split(), recipe.seed, step, size)
