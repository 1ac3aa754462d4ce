"""Two updates in flight: the next step's is submitted while the service computes this one's."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratchet.flows.opening.rollouts import Spans
from ratchet.tasks.ends import StepStopped
from ratchet.tasks.metrics import StepFiles
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
    check: Callable[[Sequence[Path]], None]

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

    `following` is there if what the next step is trained on does not depend on the update of this
    one. `draw_next` draws the next shard that is submitted.
    """

    step: int
    spans: Sequence[Path]
    following: NextStep | None = None
    draw_next: Callable[[], object] = lambda: None

    def prepare_next(self, updater: PolicyUpdater, make: Make) -> None:
        """Prepare a policy's update of the next step, if that has begun."""
        if self.following is not None:
            self.following.prepare(updater, make)
