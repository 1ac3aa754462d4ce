"""The table of estimators, and the penalty of each token for divergence from another policy.

The other policy is a reference, which the trained one stays near, or a teacher, which it is to
become. A divergence is estimated at each sampled token, from log q, its log-probability under the
policy that sampled it, and log ref, that under the other one. d is log ref - log q.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tasks.algorithm.settings import find_row

Placement = Literal["advantage", "reward"]
Baseline = Literal["none", "mean"]
Source = Literal["references", "teachers"]
"""Whose log-probabilities a penalty reads: the folder of a run that has them."""


@dataclass(frozen=True)
class DivergenceEstimator:
    """A row of the table; `estimate` maps d of each token, and β, to the divergence at each token.

    As a penalty in the advantage, `k1` has the gradient of KL(q, ref), and `jsd` that of
    β KL(ref, m) + (1 - β) KL(q, m) with m = β ref + (1 - β) q.
    """

    formula: str
    source: str
    estimate: Callable[[np.ndarray, float], np.ndarray]


SCHULMAN = "Schulman, 2020, http://joschu.net/blog/kl-approx.html"

ESTIMATORS: Mapping[str, DivergenceEstimator] = {
    "k1": DivergenceEstimator("-d", SCHULMAN, lambda d, _: -d),
    "k2": DivergenceEstimator("d² / 2", SCHULMAN, lambda d, _: d**2 / 2),
    "k3": DivergenceEstimator("exp(d) - 1 - d", SCHULMAN, lambda d, _: np.expm1(d) - d),
    "low_var_kl": DivergenceEstimator(
        "k3 of d within ±20, itself within ±10",
        "verl",
        lambda d, _: np.clip(np.expm1(np.clip(d, -20, 20)) - np.clip(d, -20, 20), -10, 10),
    ),
    "abs": DivergenceEstimator("|d|", "verl", lambda d, _: np.abs(d)),
    "jsd": DivergenceEstimator(
        "-(1 - β) log(1 - β + β exp(d))",
        "arXiv:2306.13649",
        lambda d, beta: -(1 - beta) * np.logaddexp(np.log1p(-beta), np.log(beta) + d),
    ),
}

REFUSED = {
    "corrected_k3": "weighs k3 by the ratio of the trained policy to the one that sampled, which "
    "is 1 where rewards and advantages are made; give k3",
}
"""KL estimator of the field → why it is not in the table, and what to use instead."""

TEACHINGS: Mapping[str, str] = {"reverse_kl": "k1", "jsd": "jsd"}
"""Divergence from a teacher → the estimator whose penalty has its gradient."""

REFUSED_TEACHINGS = {
    "forward_kl": "has the advantage exp(d), which one token can make as large as any sum; give "
    "jsd with a small beta, whose direction tends to that of the forward KL",
    "gkd": "reads the whole distribution of the policy and the teacher at each token, which the "
    "Tinker API does not give; give jsd, the same divergence by the tokens that were sampled",
    "top_k": "trains on the tokens that the teacher finds likeliest, not on those that the policy "
    "sampled; give reverse_kl, or texts and teacher.model of flow finetune",
}
"""Divergence from a teacher that the field knows → why there is none, and what to use instead."""


def find_estimator(name: str) -> DivergenceEstimator:
    """Return the row of an estimator; ValueError if there is none."""
    return find_row("KL estimator", name, ESTIMATORS, REFUSED)


def check_teaching(name: str) -> str:
    """Return the name of a divergence from a teacher; ValueError if there is none."""
    find_row("divergence from a teacher", name, TEACHINGS, REFUSED_TEACHINGS)
    return name


@dataclass(frozen=True)
class Penalty:
    """Penalty of each sampled token for its divergence from another policy, by its `source`.

    In the `reward`, the penalties of a call's tokens are subtracted from the call's reward. In the
    `advantage`, each token's own penalty is subtracted from its advantage and, with a `discount` γ,
    those of later tokens: Σ γ^k penalty_(t+k). The `baseline` mean, of the step's tokens, is first
    subtracted from each penalty. Only the estimator jsd reads `beta`.
    """

    coefficient: float
    estimator: str = "k1"
    placement: Placement = "advantage"
    discount: float = 0.0
    baseline: Baseline = "none"
    beta: float = 0.5
    source: Source = "references"

    def of_tokens(self, log_q: np.ndarray, log_ref: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Compute the penalties of a trajectory, 0 where a token was not sampled: [tokens]."""
        d = np.where(mask != 0, log_ref.astype(np.float64) - log_q, 0.0)
        return self.coefficient * find_estimator(self.estimator).estimate(d, self.beta)

    def from_advantages(
        self, penalties: Sequence[np.ndarray], masks: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Compute what is subtracted from the advantage of each token, of all trajectories."""
        mean = 0.0
        if self.baseline == "mean":
            count = sum(int(mask.sum()) for mask in masks)
            mean = sum(float(values.sum()) for values in penalties) / max(count, 1)
        differences = [
            np.where(mask != 0, values - mean, 0.0)
            for values, mask in zip(penalties, masks, strict=True)
        ]
        if not self.discount:
            return differences
        return [discount_sums(values, self.discount) for values in differences]


def discount_sums(values: np.ndarray, discount: float) -> np.ndarray:
    """Compute Σ_k γ^k values[t + k] at each index t."""
    sums, later = np.empty_like(values), 0.0
    for index in reversed(range(len(values))):
        later = values[index] + discount * later
        sums[index] = later
    return sums
