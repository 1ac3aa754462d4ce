"""Losses that no service computes, by their derivatives.

Each function maps log p, the log-probabilities of one datum's targets under the trained policy, to
its loss at each target, and to the derivative of the loss by each log p. It reads the datum's
`logprobs` (log q, under the policy that sampled), `advantages` (A) and `weights` (0 where a target
is not trained), all of shape [targets]. The ratio is p / q; sg marks a factor without a derivative.
"""

from collections.abc import Callable, Mapping

import numpy as np

from ratchet.tasks.algorithm.settings import Settings

Tokens = Mapping[str, np.ndarray]
LossAndDerivative = tuple[np.ndarray, np.ndarray]
WeightedLoss = Callable[[np.ndarray, Tokens, Settings], LossAndDerivative]


def dft(log_p: np.ndarray, tokens: Tokens, settings: Settings) -> LossAndDerivative:
    """Compute -sg(p) A log p, dynamic fine-tuning (Wu et al., 2025, arXiv:2508.05629)."""
    factor = np.exp(log_p) * tokens["advantages"]
    return -factor * log_p, -factor


def phi(log_p: np.ndarray, tokens: Tokens, settings: Settings) -> LossAndDerivative:
    """Compute -sg(p (1 - p)) A log p, of CHORD (Zhang et al., 2025, arXiv:2508.11408).

    Tokens that the policy finds certain, or as good as impossible, have little weight.
    """
    p = np.exp(log_p)
    factor = p * (1 - p) * tokens["advantages"]
    return -factor * log_p, -factor


def dro(log_p: np.ndarray, tokens: Tokens, settings: Settings) -> LossAndDerivative:
    """Compute -(A log p - β/2 (log p - log q)²).

    Richemond et al., 2024, arXiv:2405.19107, by token as Tinker documents it.
    """
    (beta,) = _numbers(settings, "beta")
    advantages, log_ratio = tokens["advantages"], log_p - tokens["logprobs"]
    return -advantages * log_p + beta / 2 * log_ratio**2, -advantages + beta * log_ratio


def dual_clip(log_p: np.ndarray, tokens: Tokens, settings: Settings) -> LossAndDerivative:
    """Compute PPO's loss, which a negative advantage bounds from above by -dual_clip · A.

    Ye et al., 2020, arXiv:1912.09729, equation 5: -min(ratio A, clip(ratio) A), or if A < 0
    -max(min(ratio A, clip(ratio) A), dual_clip A).
    """
    low, high, most = _numbers(settings, "clip_low_threshold", "clip_high_threshold", "dual_clip")
    advantages, ratio = tokens["advantages"], _ratio(log_p, tokens)
    clipped = np.minimum(ratio * advantages, np.clip(ratio, low, high) * advantages)
    objective = np.where(advantages < 0, np.maximum(clipped, most * advantages), clipped)
    moves = np.where(advantages < 0, (ratio > low) & (ratio < most), ratio < high)
    return -objective, np.where(moves, -ratio * advantages, 0.0)


def sapo(log_p: np.ndarray, tokens: Tokens, settings: Settings) -> LossAndDerivative:
    """Compute -f(ratio) A with the soft gate f(x) = 4 / τ · sigmoid(τ (x - 1)).

    Gao et al., 2025, arXiv:2511.20347: τ is `tau_positive` where A > 0, else `tau_negative`. At
    ratio 1 the derivative equals importance sampling's, since f'(1) = 1.
    """
    positive, negative = _numbers(settings, "tau_positive", "tau_negative")
    advantages, ratio = tokens["advantages"], _ratio(log_p, tokens)
    tau = np.where(advantages > 0, positive, negative)
    gate = 1 / (1 + np.exp(-tau * (ratio - 1)))
    return -4 / tau * gate * advantages, -4 * gate * (1 - gate) * ratio * advantages


def topr(log_p: np.ndarray, tokens: Tokens, settings: Settings) -> LossAndDerivative:
    """Compute -sg(α) A log p, α = 1 where A > 0, else the trajectory's ratio, at most 1.

    Le Roux et al., 2025, arXiv:2503.14286, equation 8. With `ratio` token, each token has its own.
    """
    advantages, log_ratio = tokens["advantages"], log_p - tokens["logprobs"]
    if settings["ratio"] == "trajectory":
        log_ratio = np.full_like(log_ratio, log_ratio[tokens["weights"] != 0].sum())
    factor = np.where(advantages > 0, 1.0, np.exp(np.minimum(log_ratio, 0.0)))
    return -factor * advantages * log_p, -factor * advantages


def sppo(log_p: np.ndarray, tokens: Tokens, settings: Settings) -> LossAndDerivative:
    """Compute -A log clip(ratio, 1 / (1 + ε), 1 + ε), the softmax PPO.

    Vaswani et al., 2021, arXiv:2108.05828.
    """
    (epsilon,) = _numbers(settings, "epsilon")
    advantages, log_ratio = tokens["advantages"], log_p - tokens["logprobs"]
    most = np.log1p(epsilon)
    moves = np.abs(log_ratio) <= most
    return -np.clip(log_ratio, -most, most) * advantages, np.where(moves, -advantages, 0.0)


def rec(log_p: np.ndarray, tokens: Tokens, settings: Settings) -> LossAndDerivative:
    """Compute group-relative REINFORCE with a choice of clip, weight and regulariser.

    Yao et al., 2025, arXiv:2509.24203: -sg(M w) A log p, with M = 1 where the ratio is within the
    clip, and w = 1, the ratio, or exp(A / temperature); the regulariser adds
    c (log p - log q)², or, as a forward KL divergence, -c log p.
    """
    advantages, ratio = tokens["advantages"], _ratio(log_p, tokens)
    coefficient, temperature = _numbers(settings, "regularizer_coefficient", "temperature")
    weighed = np.exp(advantages / temperature)
    weights = {"none": np.ones_like(ratio), "ratio": ratio, "advantage": weighed}
    factor = _within(ratio, advantages, settings) * weights[str(settings["weight"])] * advantages
    log_ratio = log_p - tokens["logprobs"]
    added, slope = {
        "none": (np.zeros_like(log_ratio), np.zeros_like(log_ratio)),
        "k2": (coefficient * log_ratio**2, 2 * coefficient * log_ratio),
        "forward_kl": (-coefficient * log_p, np.full_like(log_ratio, -coefficient)),
    }[str(settings["regularizer"])]
    return -factor * log_p + added, -factor + slope


def _within(ratio: np.ndarray, advantages: np.ndarray, settings: Settings) -> np.ndarray:
    """Return 1.0 where `clip` keeps a token of this ratio, else 0.0."""
    low, high = _numbers(settings, "clip_low_threshold", "clip_high_threshold")
    outer_low, outer_high = _numbers(settings, "ring_low_threshold", "ring_high_threshold")
    up, down = ratio <= high, ratio >= low
    kept = {
        "none": np.ones_like(ratio, bool),
        "two_side": up & down,
        "one_side": np.where(advantages >= 0, up, down),
        "ring": (up & down)
        | ((advantages >= 0) & (ratio <= outer_low))
        | ((advantages <= 0) & (ratio >= outer_high)),
    }
    return kept[str(settings["clip"])].astype(np.float64)


def _ratio(log_p: np.ndarray, tokens: Tokens) -> np.ndarray:
    return np.exp(log_p - tokens["logprobs"])


def _numbers(settings: Settings, *names: str) -> list[float]:
    return [float(settings[name]) for name in names]
