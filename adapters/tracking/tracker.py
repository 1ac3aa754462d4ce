"""Trackers of experiments: what they are told of a run and of its steps, in no tracker's terms."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class TrackerFailed(Exception):
    """Failure of a tracker: it may succeed later, and the run needs none of it."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run as its trackers are told of it.

    `id` is the same whenever the run is opened, and that of no other run. `config` has no secrets.
    `folder` holds what the tracker writes on this machine.
    """

    name: str
    id: str
    config: Mapping[str, object]
    folder: Path


@dataclass(frozen=True, slots=True)
class SavedWeights:
    """A checkpoint of a policy: the addresses of its weights at the service."""

    policy: str
    step: int
    sampler: str
    state: str


Row = Mapping[str, str | float | None]
"""Row of a table."""


class TrackedStep(Protocol):
    """A step of a run that is done, and the evaluation of a checkpoint that is known by then.

    It depends on the run's files alone, so that it is the same whenever it is read.
    """

    @property
    def number(self) -> int:
        """Number of the step, from 0; evaluations that outlast the training have later ones."""
        ...

    @property
    def checkpoint(self) -> int:
        """Checkpoint that `scores` are of."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics of the step."""
        ...

    def scores(self) -> Mapping[str, float]:
        """Return the scores of the checkpoint: `test/…` as sampled, `greedy/…` greedily."""
        ...

    def tables(self, most: int) -> Mapping[str, Sequence[Row]]:
        """Return tables of at most so many rollouts of the step and of the evaluation, or texts."""
        ...

    def weights(self) -> Sequence[SavedWeights]:
        """Return the checkpoints with a training state that the step has saved."""
        ...


class Tracker(Protocol):
    """A tracker of experiments that has a run open; each method may raise TrackerFailed."""

    def next_step(self) -> int:
        """Return the first step that the tracker does not have."""
        ...

    def send(self, step: TrackedStep) -> None:
        """Send a step that the tracker does not have."""
        ...

    def close(self) -> None:
        """Send what waits to be sent, all recorded steps having been given, and close the run."""
        ...
