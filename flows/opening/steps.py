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

from prefect.futures import wait

from ratchet.flows.opening.rollouts import RolloutRunner, Spans, training_groups
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
from ratchet.tasks.updates import StepUpdate

Make = Callable[[int, Sequence[Path]], StepFiles]
"""Makes what a policy is trained on at a step, of the sealed spans."""


@dataclass(frozen=True)
class PlayedStep:
    """A step whose rollouts have ended, with their sealed spans.

    `ahead` are the batches of the next step: none if it has not begun, or if what it is trained on
    depends on the update of this one. `check` raises StepStopped if they have too few rewards.
    `draw_next` draws the next shard that is submitted.
    """

    step: int
    spans: Sequence[Path]
    ahead: Sequence[Spans] = ()
    check: Check = lambda _: None
    draw_next: Callable[[], object] = lambda: None

    def next_update(self, make: Make) -> StepUpdate | None:
        """Return a policy's next update, of datums that are made if the rollouts end in time."""

        def trained() -> list[Path] | None:
            spans = self._spans_ahead()
            return None if spans is None else make(self.step + 1, spans).trained()

        return StepUpdate(self.step + 1, trained, self._pending) if self.ahead else None

    def _pending(self) -> list[Future[Any]]:
        return [one for batch in self.ahead if not (one := batch.wrapped_future).done()]

    def _spans_ahead(self) -> list[Path] | None:
        """Return the next step's sealed spans if all have ended well, without waiting.

        An error of the step is raised when its turn comes.
        """
        if self._pending():
            return None
        for batch in self.ahead:
            batch.wait()
            if not batch.state.is_completed():
                return None
        spans = [batch.result() for batch in self.ahead]
        try:
            self.check(spans)
        except StepStopped:
            return None
        return spans


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
    for step, batches, begun in steps:
        for batch in batches if rollouts.stream else ():
            batch.wait()
            if not batch.state.is_completed():
                break
            accumulate(run, step, batch.result(), recipe.credit())
        ahead = () if recipe.judge.judges else begun  # a judge may be the policy after this step
        draw_next = partial(_draw_before, run.end, draw, step + rollouts.lag + 1)
        yield PlayedStep(step, runner.wait_for(batches), ahead, runner.check, draw_next)


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
            wait([*batches])
            teaching, calls = measure_yield([batch.result() for batch in batches])
            if teaching >= rollouts.groups if trained_calls is None else calls >= trained_calls:
                break
            batches += submit(step, checkpoint, number)
        yield step, batches, []


def draw_train_shard(recipe: Recipe, run: RunFolder, step: int) -> Path:
    rollouts, path = recipe.rollouts, run.shard(shard_name("train", step))
    size = ShardSize(rollouts.groups, rollouts.batches, rollouts.rounds)
    return draw_shard.make(path, recipe.train_split(), recipe.seed, step, size)
