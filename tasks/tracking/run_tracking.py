"""The trackers of a run: a thread for each sends it what it lacks of the run's files."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import copy_context
from functools import partial
from threading import Event, Thread
from types import TracebackType
from typing import Self

from ratchet.tasks.recording.step_log import steps_done
from ratchet.tasks.recording.views import UNREADABLE
from ratchet.tasks.reports.facts import BROKEN
from ratchet.tasks.storage.run_folder import RunFolder
from ratchet.tasks.tracking.recorded_step import RecordedStep
from ratchet.tasks.tracking.trackers import Tracker, TrackerFailed

LAST_SECONDS = 60.0
"""Seconds for which a run that has ended waits until its trackers have it all."""
FAILED_SECONDS = 5.0
"""Seconds for which a run that an error ends waits."""
STOPPED_SECONDS = 1.0
"""Seconds for which a run that a signal ends waits, within the signal's grace."""

TRACKING_FAILURES = (TrackerFailed, RuntimeError, *BROKEN, *UNREADABLE)
"""Errors of trackers, of what draws their pictures, and of files that cannot be read."""

log = logging.getLogger(__name__)


class RunTracking:
    """Trackers of a run while it is open.

    They are opened when the run is first followed. Each is sent what it lacks of the run's files,
    so that a run that goes on after a crash, or is a fork, is whole in each tracker. A tracker that
    fails is tried again after the next step; one warning says so, and the run needs no tracker.
    """

    def __init__(
        self, run: RunFolder, openers: Mapping[str, Callable[[], Tracker]], steps: int, lag: int
    ) -> None:
        self.is_followed = False
        self._run, self._steps, self._lag = run, steps, lag
        self._whole = False
        """Whether evaluations behind the last step are there."""
        self._followers = [
            Follower(name, _Tracked(open_, self._from_step)) for name, open_ in openers.items()
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: object, trace: TracebackType | None
    ) -> None:
        self._whole = kind is None
        for follower in self._followers:
            follower.end()
        patience = STOPPED_SECONDS if kind is not None else LAST_SECONDS
        if kind is not None and issubclass(kind, Exception):
            patience = FAILED_SECONDS
        until = time.monotonic() + patience
        for follower in self._followers:
            follower.wait(max(0.0, until - time.monotonic()))

    def follow(self) -> None:
        """Have each tracker sent the steps that are done."""
        self.is_followed = True
        for follower in self._followers:
            follower.wake()

    def _from_step(self, first: int) -> Iterator[RecordedStep]:
        whole, done = self._whole, steps_done(self._run.metrics)
        last = done + self._lag + 1 if whole and done == self._run.steps_of(self._steps) else done
        for number in range(first, last):
            step = RecordedStep(self._run, number, self._lag)
            if number < done or step.scores():
                yield step


class _Tracked:
    """A tracker that is sent what it does not have, and opened anew if it has failed."""

    def __init__(
        self, opener: Callable[[], Tracker], from_step: Callable[[int], Iterator[RecordedStep]]
    ) -> None:
        self._open, self._from_step = opener, from_step
        self._tracker: Tracker | None = None
        self._next = 0

    def __call__(self, ended: bool) -> None:
        """Send what there is, and close the tracker at the end."""
        tracker, self._tracker = self._tracker, None
        if tracker is None:
            tracker = self._open()
            self._next = tracker.next_step()
        for step in self._from_step(self._next):
            tracker.send(step)
            self._next = step.number + 1
        if ended:
            tracker.close()
        self._tracker = tracker  # it has not failed


class Follower:
    """A thread that publishes something of a run whenever it is woken, and never stops the run."""

    def __init__(self, name: str, publish: Callable[[bool], None]) -> None:
        self._name, self._publish = name, publish
        self._woken, self._ended, self._told = Event(), Event(), False
        # The process does not wait for it: a tracker may be silent for long. The context names the
        # flow run.
        work = partial(copy_context().run, self._work)
        self._thread = Thread(target=work, name=f"tracking-{name}", daemon=True)

    def wake(self) -> None:
        """Publish what there is, at once or after what is being published."""
        self._woken.set()
        if self._thread.ident is None:  # it was never started
            self._thread.start()

    def end(self) -> None:
        """Publish what there is, for the last time."""
        self._ended.set()
        self._woken.set()

    def wait(self, seconds: float) -> None:
        """Wait for the end, but at most `seconds`."""
        if self._thread.is_alive():
            self._thread.join(seconds)
            if self._thread.is_alive():
                self._tell("it was not sent all in the time that a run waits for it")
        self._told = True  # what fails later finds a server that ends with the run

    def _work(self) -> None:
        ended = False
        while not ended:
            self._woken.wait()
            self._woken.clear()
            ended = self._ended.is_set()
            try:
                self._publish(ended)
            except TRACKING_FAILURES as error:
                self._tell(f"{error}")

    def _tell(self, why: str) -> None:
        if not self._told:
            log.warning(
                "%s does not have all of the run: %s. The training needs none of it; what is "
                "missing is sent after a later step, or when the run is resumed",
                self._name,
                why,
            )
        self._told = True


def publish_beside(name: str, publish: Callable[[], None]) -> None:
    """Publish something at once, in a thread that is waited for no longer than LAST_SECONDS."""
    follower = Follower(name, lambda _: publish())
    follower.end()
    follower.wake()
    follower.wait(LAST_SECONDS)
