"""The steps of a run: rollouts are sampled, and the next update submitted, during earlier steps.

Whoever iterates over the steps trains a step before it asks for the next one, so checkpoint s is
there when step s is asked for.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

from ratchet.flows.opening.rollouts import RolloutRunner, Spans, training_groups, wait_for_batches
from ratchet.flows.opening.run import OpenRun
from ratchet.flows.recipe.recipe import Recipe
from ratchet.tasks.datums import datums_of_batch
from ratchet.tasks.ends import Check, StepStopped
from ratchet.tasks.examples.shards import ShardSize, draw_shard
from ratchet.tasks.metrics import StepFiles
from ratchet.tasks.rollouts import measure_yield
from ratchet.tasks.settings.algorithm import CreditAssignment
from ratchet.tasks.settings.rollouts import Rollouts
from ratchet.tasks.storage.names import shard_name
from ratchet.tasks.storage.run_folder import RunFolder
from ratchet.tasks.updates import NextUpdate, PolicyUpdater

Make = Callable[[int, Sequence[Path]], StepFiles]
"""Makes what a policy is trained on at a step, of the sealed spans."""


@dataclass(frozen=True)
class NextStep:
    """Rollouts of the next step, which has begun while an earlier one is trained.

    `check` raises StepStopped if they have too few rewards.
    """

    step: int
    batches: Sequence[Spans]
    check: Check

    def prepare(self, updater: PolicyUpdater, make: Make) -> None:
        """Have a policy's update follow at once, if the rollouts end before the one before it."""

        def trained() -> list[Path] | None:
            spans = self._ended_spans()
            return None if spans is None else make(self.step, spans).trained()

        updater.follow_with(NextUpdate(self.step, trained, self._pending))

    def _pending(self) -> list[Future[Any]]:
        played = [batch.wrapped_future for batch in self.batches]
        return [future for future in played if not future.done()]

    def _ended_spans(self) -> list[Path] | None:
        """Return the sealed spans if all have ended well, without waiting.

        An error of the step is raised when its turn comes.
        """
        if self._pending():
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

    `following` is the next step. It is None if that has not begun, or if what it is trained on
    depends on the update of this one. `draw_next` draws the next shard that is submitted.
    """

    step: int
    spans: Sequence[Path]
    following: NextStep | None = None
    draw_next: Callable[[], object] = lambda: None


Submit = Callable[[int, int, int], Sequence[Spans]]
"""Submits the batches of (step, checkpoint, round): one round of the step's own shard."""

Steps = Iterator[tuple[int, Sequence[Spans], Sequence[Spans]]]
"""(step, its batches, the next step's batches or [])."""


def play_steps(run: OpenRun, recipe: Recipe, runner: RolloutRunner) -> Iterator[PlayedStep]:
    """Yield the steps that are left.

    If the rollouts stream, the forward-backward pass of each batch is submitted when the batch has
    ended, in their order. StepStopped ends a run if a step has too few rewards or no answer.
    """
    rollouts, groups = recipe.rollouts, training_groups(recipe)
    draw = cache(partial(draw_train_shard, recipe, run.folder))

    def submit(step: int, checkpoint: int, number: int) -> Sequence[Spans]:
        return runner.submit_shard(draw(step), checkpoint, groups, number)

    steps = steps_by_shard(run.steps_left(), rollouts.lag, submit)
    if rollouts.rounds > 1:
        steps = sample_on(steps, rollouts, submit, recipe.algorithm.trained_calls)
    for step, batches, following in steps:
        for batch in batches if rollouts.stream else ():
            batch.wait()
            if not batch.state.is_completed():
                break
            accumulate(run, step, batch.result(), recipe.credit())
        alone = not following or recipe.judge.judges  # a judge may be the policy after this step
        ahead = None if alone else NextStep(step + 1, following, runner.check)
        spans, later = runner.wait_for(batches), step + rollouts.lag + 1
        yield PlayedStep(step, spans, ahead, partial(_draw_before, run.end, draw, later))


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
    submitted, left = deque[Sequence[Spans]](), iter(steps)
    for step in steps:
        for ahead in islice(left, lag + 1 - len(submitted)):
            submitted.append(submit(ahead, max(ahead - lag, 0), 0))
        batches = submitted.popleft()
        yield step, batches, submitted[0] if submitted else []


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
            teaching, calls = measure_yield(wait_for_batches(batches))
            if teaching >= rollouts.groups if trained_calls is None else calls >= trained_calls:
                break
            batches += submit(step, checkpoint, number)
        yield step, batches, []


def draw_train_shard(recipe: Recipe, run: RunFolder, step: int) -> Path:
    rollouts, path = recipe.rollouts, run.shard(shard_name("train", step))
    size = ShardSize(rollouts.groups, rollouts.batches, rollouts.rounds)
    return draw_shard(path, recipe.train_split(), recipe.seed, step, size)
