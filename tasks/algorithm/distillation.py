"""The table of distillation losses: what is learnt from a teacher's likeliest tokens.

At each trained position, q are the probabilities that the teacher gives its k likeliest tokens, and
p are the policy's probabilities of the same tokens. The tail is one bucket for all other tokens:
its probability is Q = 1 - Σ q under the teacher, and P = 1 - Σ p under the policy. A divergence
over k tokens and a tail is at most the divergence over the whole vocabulary, and 0 only if every p
is its q.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ratchet.tasks.algorithm.loss import Arrays, Columns, Input, Loss, precise, scaled_advantages
from ratchet.tasks.algorithm.settings import Known, Settings, find_row

NO_TOKEN = -99999.0
"""Log-probability in a cell of a table that has no token."""

TAIL_FLOOR = 1e-6
"""Smallest probability of a tail: 1 - Σ p in single precision is no finer."""

LossAndTopDerivatives = tuple[np.ndarray, np.ndarray]
"""The loss at each position, [positions], and its derivatives by log p, [positions, k]."""


def _of_top(name: str) -> Input:
    return lambda columns, _: columns[name].reshape(len(columns["targets"]), -1)


def _weights_of_top(columns: Columns, settings: Settings) -> np.ndarray:
    weights = columns["mask"] * scaled_advantages(columns, settings)
    top = _of_top("top_logprobs")(columns, settings)
    return np.where(top > NO_TOKEN, weights[:, None], 0.0)


NO_SETTINGS: Known = {}
DISTILLED: Mapping[str, Input] = {
    "target_tokens": _of_top("top_tokens"),
    "weights": _weights_of_top,
    "top_logprobs": _of_top("top_logprobs"),
}
"""Inputs of a distillation loss, of shape [targets, k]."""


@dataclass(frozen=True)
class Distillation(Loss):
    """A row of the table; its function reads log p and log q, both [positions, k].

    The log-probabilities and the derivatives of a datum have k values for each target, too.
    """

    formula: str
    source: str
    function: Callable[[np.ndarray, np.ndarray], LossAndTopDerivatives]
    settings = NO_SETTINGS
    inputs = DISTILLED

    def derive(
        self, settings: Settings, logprobs: Arrays, inputs: Sequence[Columns]
    ) -> list[np.ndarray]:
        return [
            self.function(log_p.astype(np.float64), precise(columns)["top_logprobs"])[1]
            for log_p, columns in zip(logprobs, inputs, strict=True)
        ]

    def measure(
        self, settings: Settings, batch: Sequence[Columns], logprobs: Arrays
    ) -> dict[str, float]:
        """Measure how far the policy is from its teacher, in nats a token.

        `loss` is the divergence over the teacher's likeliest tokens and a tail, and
        `teacher/covered` the probability of these tokens under the teacher, both over the weights
        of the tokens.
        """
        total = lost = covered = 0.0
        for own, log_p in zip(batch, logprobs, strict=True):
            weights = own["advantages"].astype(np.float64)
            log_q = own["top_logprobs"].astype(np.float64).reshape(log_p.shape)
            losses, _ = self.function(log_p.astype(np.float64), log_q)
            total += float(weights.sum())
            lost += float(weights @ losses)
            covered += float(weights @ np.exp(log_q).sum(1))
        return {"loss": lost / total, "teacher/covered": covered / total}


def forward_kl(log_p: np.ndarray, log_q: np.ndarray) -> LossAndTopDerivatives:
    """Compute Σ q log(q / p) + Q log(Q / P)."""
    p, q, tail_p, tail_q = _tails(log_p, log_q)
    apart = np.where(q > 0, log_q - log_p, 0.0)
    loss = (q * apart).sum(-1) + tail_q * np.log(tail_q / tail_p)
    return loss, (tail_q / tail_p)[..., None] * p - q


def reverse_kl(log_p: np.ndarray, log_q: np.ndarray) -> LossAndTopDerivatives:
    """Compute Σ p log(p / q) + P log(P / Q)."""
    p, q, tail_p, tail_q = _tails(log_p, log_q)
    apart, tail = np.where(q > 0, log_p - log_q, 0.0), np.log(tail_p / tail_q)
    return (p * apart).sum(-1) + tail_p * tail, p * (apart - tail[..., None])


def _tails(log_p: np.ndarray, log_q: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return p, q and the probabilities of the tails; cells without a token have probability 0."""
    p, q = np.where(log_q > NO_TOKEN, np.exp(log_p), 0.0), np.exp(log_q)
    return p, q, *(np.maximum(1 - one.sum(-1), TAIL_FLOOR) for one in (p, q))


DISTILLATIONS: Mapping[str, Distillation] = {
    "forward_kl": Distillation("Σ q log(q / p) + Q log(Q / P)", "arXiv:1503.02531", forward_kl),
    "reverse_kl": Distillation("Σ p log(p / q) + P log(P / Q)", "arXiv:2306.08543", reverse_kl),
}


def find_distillation(name: str) -> Distillation:
    """Return the row of a divergence; ValueError if there is no such row."""
    return find_row("divergence", name, DISTILLATIONS)
