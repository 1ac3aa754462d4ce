"""The share of the learning rate that an optimizer step takes: by schedule, and by its sample."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import cos, pi, sqrt
from typing import Literal

import numpy as np

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


def share_by_sample(logprobs: Sequence[np.ndarray], sampled: Sequence[np.ndarray]) -> float:
    """Return √(ESS / B) of a batch of B trajectories (Huang et al., 2026, arXiv:2602.17616).

    ESS is Kish's effective sample size, (Σw)² / Σw², of the trajectories' importance weights w =
    p / q. Each trajectory has its log p and log q, of shape [targets]; log q is 0 where a target
    was not sampled. The share is 1 on-policy, and √(1 / B) if one weight outweighs all others.
    """
    ratios = np.array(
        [
            np.where(log_q != 0, log_p.astype(np.float64) - log_q, 0).sum()
            for log_p, log_q in zip(logprobs, sampled, strict=True)
        ]
    )
    weights = np.exp(ratios - ratios.max())
    return sqrt(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))
