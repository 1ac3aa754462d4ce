"""The table of KL estimators, and the terms that an algorithm adds to each token.

A divergence is estimated at each sampled token, from log q, its log-probability under the policy
that sampled it, and log ref, that under the reference. d is log ref - log q.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tasks.algorithm.settings import find_row

Placement = Literal["advantage", "reward"]
Baseline = Literal["none", "mean"]
Estimate = Callable[[np.ndarray], np.ndarray]
"""d of each token → the estimate at each token."""


@dataclass(frozen=True)
class Estimator:
    """A row of the table."""

    formula: str
    source: str
    estimate: Estimate


SCHULMAN = "Schulman, 2020, http://joschu.net/blog/kl-approx.html"

ESTIMATORS: Mapping[str, Estimator] = {
    "k1": Estimator("-d", SCHULMAN, lambda d: -d),
    "k2": Estimator("d² / 2", SCHULMAN, lambda d: d**2 / 2),
    "k3": Estimator("exp(d) - 1 - d", SCHULMAN, lambda d: np.expm1(d) - d),
    "low_var_kl": Estimator(
        "k3 of d within ±20, itself within ±10",
        "verl",
        lambda d: np.clip(np.expm1(np.clip(d, -20, 20)) - np.clip(d, -20, 20), -10, 10),
    ),
    "abs": Estimator("|d|", "verl", np.abs),
}

REFUSED = {
    "corrected_k3": "weighs k3 by the ratio of the trained policy to the one that sampled, which "
    "is 1 where rewards and advantages are made; give k3",
}
"""KL estimator of the field → why it is not in the table, and what to use instead."""


def find_estimator(name: str) -> Estimator:
    """Return the row of an estimator; ValueError if there is none."""
    return find_row("KL estimator", name, ESTIMATORS, REFUSED)


@dataclass(frozen=True)
class Penalty:
    """Penalty of each sampled token for its divergence from the reference.

    As `reward`, a call's reward is lessened by the penalties of its tokens. As `advantage`, each
    token's advantage is lessened by its own penalty and, with a `discount` γ, by those of later
    tokens: Σ γ^k penalty_(t+k); the `baseline` mean, which is that of the step's tokens, is first
    subtracted from each.
    """

    coefficient: float
    estimator: str = "k1"
    placement: Placement = "advantage"
    discount: float = 0.0
    baseline: Baseline = "none"

    def of_tokens(self, log_q: np.ndarray, log_ref: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Compute the penalties of a trajectory, 0 where a token was not sampled: [tokens]."""
        d = np.where(mask != 0, log_ref.astype(np.float64) - log_q, 0.0)
        return self.coefficient * find_estimator(self.estimator).estimate(d)

    def from_advantages(
        self, penalties: Sequence[np.ndarray], masks: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Compute what each token's advantage is lessened by, of all trajectories of a step."""
        mean = 0.0
        if self.baseline == "mean":
            count = sum(int(mask.sum()) for mask in masks)
            mean = sum(float(values.sum()) for values in penalties) / max(count, 1)
        apart = [
            np.where(mask != 0, values - mean, 0.0)
            for values, mask in zip(penalties, masks, strict=True)
        ]
        return (
            [discount_sums(values, self.discount) for values in apart] if self.discount else apart
        )


def discount_sums(values: np.ndarray, discount: float) -> np.ndarray:
    """Compute Σ_k γ^k values[t + k] at each place t."""
    sums = np.empty_like(values)
    following = 0.0
    for place in range(len(values) - 1, -1, -1):
        following = values[place] + discount * following
        sums[place] = following
    return sums
