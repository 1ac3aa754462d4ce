"""The table of estimators, and the penalty of each token for divergence from another policy.

The other policy is a reference, which the trained one stays near, or a teacher, which it is to
become. A divergence is estimated at each sampled token, from log q, its log-probability under the
policy that sampled it, and log ref, that under the other one. d is log ref - log q, and in the loss
log ref - log p, p being the policy that is trained.

A term has the gradient of a divergence in one place, which depends on the estimator. In a token's
advantage, or its reward, the weight of the gradient of log p is the estimate itself; in the loss it
is the estimate's derivative by log p, its slope.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ratchet.tasks.algorithm.settings import find_row

Placement = Literal["advantage", "reward", "loss"]
Source = Literal["references", "teachers"]
"""Whose log-probabilities a penalty reads: the folder of a run that has them."""


@dataclass(frozen=True)
class DivergenceEstimator:
    """A row of the table; `estimate` maps d of each token, and β, to the divergence at each token.

    `placements` are where a penalty has a divergence's gradient. In the advantage and in the
    reward, `k1` has the gradient of KL(q, ref). In the advantage, `jsd` has the gradient of β
    KL(ref, m) + (1 - β) KL(q, m) with m = β ref + (1 - β) q. In the loss, `k2` has the gradient of
    KL(p, ref), `k3` of KL(ref, p), and `abs` of their total variation. Estimators of the loss have
    a `slope`, the derivative of the estimate by log p.
    """

    formula: str
    source: str
    estimate: Callable[[np.ndarray, float], np.ndarray]
    placements: tuple[Placement, ...] = ("loss",)
    slope: Callable[[np.ndarray], np.ndarray] | None = None


def _low_var_slope(d: np.ndarray) -> np.ndarray:
    """Return the slope of k3, 0 where either bound of low_var_kl holds the estimate."""
    within = np.abs(d) < 20
    bounded = np.where(within, d, 0.0)
    return np.where(within & (np.expm1(bounded) - bounded < 10), -np.expm1(bounded), 0.0)


SCHULMAN = "Schulman, 2020, http://joschu.net/blog/kl-approx.html"

ESTIMATORS: Mapping[str, DivergenceEstimator] = {
    "k1": DivergenceEstimator("-d", SCHULMAN, lambda d, _: -d, ("advantage", "reward")),
    "k2": DivergenceEstimator("d² / 2", SCHULMAN, lambda d, _: d**2 / 2, slope=lambda d: -d),
    "k3": DivergenceEstimator(
        "exp(d) - 1 - d", SCHULMAN, lambda d, _: np.expm1(d) - d, slope=lambda d: -np.expm1(d)
    ),
    "low_var_kl": DivergenceEstimator(
        "k3 of d within ±20, itself within ±10",
        "verl",
        lambda d, _: np.clip(np.expm1(np.clip(d, -20, 20)) - np.clip(d, -20, 20), -10, 10),
        slope=_low_var_slope,
    ),
    "abs": DivergenceEstimator("|d|", "verl", lambda d, _: np.abs(d), slope=lambda d: -np.sign(d)),
    "jsd": DivergenceEstimator(
        "-(1 - β) log(1 - β + β exp(d))",
        "arXiv:2306.13649",
        lambda d, beta: -(1 - beta) * np.logaddexp(np.log1p(-beta), np.log(beta) + d),
        ("advantage",),
    ),
}

DIVERGENCE = "kl"
"""Loss of a penalty in the loss, whose setting is its `estimator`."""

LOSS_ESTIMATORS = tuple(name for name, row in ESTIMATORS.items() if "loss" in row.placements)
"""Estimators that are a term of the loss."""

TEACHER_ESTIMATORS: Mapping[str, str] = {"reverse_kl": "k1", "jsd": "jsd"}
"""Divergence from a teacher → the estimator whose penalty has its gradient."""


def find_estimator(name: str) -> DivergenceEstimator:
    """Return the row of an estimator; ValueError if there is no such row."""
    return find_row("KL estimator", name, ESTIMATORS)


def check_placement(estimator: str, placement: Placement) -> None:
    """Refuse (ValueError) a placement where an estimator has no divergence's gradient."""
    row = find_estimator(estimator)
    if placement not in row.placements:
        others = "" if placement == "loss" else f", {estimator} with placement {row.placements[0]}"
        right = "k2" if placement == "loss" else "k1"
        raise ValueError(
            f"the KL estimator {estimator} in the {placement} has no divergence's gradient, so "
            f"that it keeps no policy near its reference; give {right}{others}"
        )


def check_teaching(name: str) -> str:
    """Return the name of a divergence from a teacher; ValueError if there is no such row."""
    find_row("divergence from a teacher", name, TEACHER_ESTIMATORS)
    return name
