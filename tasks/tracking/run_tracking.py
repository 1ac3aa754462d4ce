"""A run's files → its trackers, each of which a thread of its own keeps up with the run."""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from threading import Event, Thread
from types import TracebackType
from typing import Self

import duckdb

from adapters.errors import UserError
from adapters.tracking.tracker import Tracker, TrackerFailed
from tasks.recording.step_log import read_metrics
from tasks.storage.run_folder import RunFolder
from tasks.tracking.recorded_step import RecordedStep

LAST_SECONDS = 60.0
"""Seconds for which a run that has ended waits until its trackers have it all."""
STOPPED_SECONDS = 5.0
"""Seconds for which a run that an error ends does."""

FAILURES = (TrackerFailed, UserError, OSError, ValueError, duckdb.Error)
"""Errors of trackers, and of files that cannot be read."""

log = logging.getLogger(__name__)


class RunTracking:
    """Trackers of a run while it is open.

    They are opened when the run is first followed, and are sent what its files say and they do not
    have: a run that goes on after a crash, or is a fork, is whole in each of them. A tracker that
    fails is tried again after the next step; one warning says so, and the run needs none of them.
    """

    def __init__(
        self, run: RunFolder, openers: Mapping[str, Callable[[], Tracker]], steps: int, lag: int
    ) -> None:
        self._recorded = _Recorded(run, steps, lag)
        self._followers = [
            _Follower(name, open_, self._recorded) for name, open_ in openers.items()
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: object, trace: TracebackType | None
    ) -> None:
        self._recorded.whole = kind is None
        for follower in self._followers:
            follower.end()
        for follower in self._followers:
            follower.wait(LAST_SECONDS if kind is None else STOPPED_SECONDS)

    def follow(self) -> None:
        """Have each tracker sent the steps that are done."""
        for follower in self._followers:
            follower.wake()


@dataclass
class _Recorded:
    """The steps that a run has recorded; once it is `whole`, the evaluations behind the last."""

    run: RunFolder
    steps: int
    lag: int
    whole: bool = False

    def from_step(self, first: int) -> Iterator[RecordedStep]:
        """Yield the steps from a number on."""
        whole, done = self.whole, len(read_metrics(self.run.metrics))
        last = done + self.lag + 1 if whole and done == self.steps else done
        for number in range(first, last):
            step = RecordedStep(self.run, number, self.lag)
            if number < done or step.scores():
                yield step


class _Follower:
    """A thread that sends a tracker what it does not have, whenever it is woken."""

    def __init__(self, name: str, opener: Callable[[], Tracker], recorded: _Recorded) -> None:
        self._name, self._open, self._recorded = name, opener, recorded
        self._woken, self._ended, self._told = Event(), Event(), False
        self._tracker: Tracker | None = None
        self._next = 0
        # The process does not wait for it: a tracker may be silent for long.
        self._thread = Thread(target=self._work, name=f"tracking-{name}", daemon=True)

    def wake(self) -> None:
        """Send what there is, at once or after what is being sent."""
        self._woken.set()
        if self._thread.ident is None:  # it was never started
            self._thread.start()

    def end(self) -> None:
        """Send what there is, and close the tracker."""
        self._ended.set()
        self._woken.set()

    def wait(self, seconds: float) -> None:
        """Wait for the end, but no longer than so many seconds."""
        if self._thread.is_alive():
            self._thread.join(seconds)
            if self._thread.is_alive():
                self._tell(f"it was not sent all within {seconds:.0f} s")

    def _work(self) -> None:
        ended = False
        while not ended:
            self._woken.wait()
            self._woken.clear()
            ended = self._ended.is_set()
            try:
                self._send(ended)
            except FAILURES as error:
                self._tracker = None
                self._tell(f"{error}")

    def _send(self, ended: bool) -> None:
        if self._tracker is None:
            self._tracker = self._open()
            self._next = self._tracker.next_step()
        for step in self._recorded.from_step(self._next):
            self._tracker.send(step)
            self._next = step.number + 1
        if ended:
            self._tracker.close()

    def _tell(self, why: str) -> None:
        if not self._told:
            log.warning(
                "%s does not have all of the run: %s. The training needs none of it; what is "
                "missing is sent after a later step, or when the run is resumed",
                self._name,
                why,
            )
        self._told = True
