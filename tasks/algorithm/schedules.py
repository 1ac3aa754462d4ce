"""Learning-rate schedules: a step of a run → the share of the learning rate that it takes."""

from dataclasses import dataclass
from math import cos, pi
from typing import Literal

ScheduleName = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class Schedule:
    """Shares of the learning rate over the `steps` of a run.

    The share rises linearly over `warmup` steps to 1, and falls by the named curve towards
    `floor`, which it would reach at the step after the last.
    """

    name: ScheduleName
    steps: int
    warmup: int = 0
    floor: float = 0.0

    def share(self, step: int) -> float:
        """Return the share of a step, which counts from 0."""
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        passed = (step - self.warmup) / (self.steps - self.warmup)
        left = {"constant": 1.0, "linear": 1 - passed, "cosine": (1 + cos(pi * passed)) / 2}
        return self.floor + (1 - self.floor) * left[self.name]
