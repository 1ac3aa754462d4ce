"""The table of losses: what each reads, which settings it has, and how it is computed.

A loss is a row of LOSSES. A service computes a *built-in* loss in one forward-backward pass. A loss
*by weights* takes a forward pass more: its log-probabilities go into a function, of
`tasks.algorithm.weighted_losses` or of a batch, and the derivative by each of them becomes
the weight of that token in a pass of cross-entropy, whose gradient is the gradient of the loss.
Losses are summed over tokens. A function of the user's project is a loss by weights as well.
"""

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import fsum
from typing import TYPE_CHECKING, cast

import numpy as np

from ratchet.tasks.algorithm import weighted_losses
from ratchet.tasks.algorithm.distillation import DISTILLATIONS
from ratchet.tasks.algorithm.divergences import DIVERGENCE, LOSS_ESTIMATORS, find_estimator
from ratchet.tasks.algorithm.loss import (
    Arrays,
    Columns,
    Input,
    Loss,
    column,
    precise,
    scaled_advantages,
    scaled_mask,
)
from ratchet.tasks.algorithm.preferences import PREFERENCES
from ratchet.tasks.algorithm.settings import (
    ANY,
    Known,
    NotedSettings,
    Number,
    Option,
    OwnFunctionError,
    Settings,
    calling,
    complete_settings,
    find_own,
    find_row,
    is_as_bound,
    is_own,
)

if TYPE_CHECKING:  # they import the SDK, which takes a while
    from tinker.types import LossFnType

POLICY_GRADIENT: Mapping[str, Input] = {
    "target_tokens": column("targets"),
    "logprobs": column("logprobs"),
    "advantages": scaled_advantages,
}
WEIGHTED: Mapping[str, Input] = {
    "target_tokens": column("targets"),
    "weights": scaled_mask,
    "logprobs": column("logprobs"),
    "advantages": column("advantages"),
}
"""Inputs of a loss by weights: the service gets the first two, the function all of them."""


@dataclass(frozen=True)
class TokenLoss(Loss):
    """A loss of each token by its advantage, which is the weight of a token that is given.

    A loss by weights has a function, `weighted`. `regularized` is whether, with these settings,
    sampled tokens of zero advantage have a loss too.
    """

    formula: str
    source: str
    service_loss: "LossFnType" = "cross_entropy"
    inputs: Mapping[str, Input] = field(default_factory=lambda: WEIGHTED)
    settings: Known = field(default_factory=dict[str, Number | Option])
    weighted: weighted_losses.WeightedLoss | None = None
    regularized: Callable[[Settings], bool] = lambda _: False

    @property
    def built_in(self) -> bool:
        return self.weighted is None

    def derive(
        self, settings: Settings, logprobs: Arrays, inputs: Sequence[Columns]
    ) -> list[np.ndarray]:
        assert self.weighted is not None
        return [
            self.weighted(log_p.astype(np.float64), precise(tokens), settings)[1]
            for log_p, tokens in zip(logprobs, inputs, strict=True)
        ]

    def measure(
        self, settings: Settings, batch: Sequence[Columns], logprobs: Arrays
    ) -> dict[str, float]:
        """Measure the loss of the datums that no policy sampled, in nats a token by its weight."""
        given = [
            ((own["advantages"] * own["mask"]).astype(np.float64), log_p.astype(np.float64))
            for own, log_p in zip(batch, logprobs, strict=True)
            if not own["sampled"]
        ]
        total = fsum(float(weights.sum()) for weights, _ in given)
        lost = fsum(float(-(weights @ log_p)) for weights, log_p in given)
        return {"loss": lost / total} if total else {}

    def weights(self, batch: Sequence[Columns]) -> list[np.ndarray] | None:
        """Return the weights of the tokens, unless a policy sampled a datum."""
        if any(own["sampled"] for own in batch):
            return None
        return [own["advantages"] for own in batch]


DIVERGENCE_SETTINGS: Known = {"estimator": Option(LOSS_ESTIMATORS[0], LOSS_ESTIMATORS)}
REFERENCE_INPUTS: Mapping[str, Input] = {
    "target_tokens": column("targets"),
    "weights": scaled_mask,
    "references": column("references"),
}
"""Settings and inputs of a KL penalty in the loss."""


class DivergenceLoss(Loss):
    """The KL penalty in the loss: a second term over the same datums."""

    formula = "the estimator's divergence from the reference"
    source = "docs/algorithms.md"
    settings = DIVERGENCE_SETTINGS
    inputs = REFERENCE_INPUTS

    def derive(
        self, settings: Settings, logprobs: Arrays, inputs: Sequence[Columns]
    ) -> list[np.ndarray]:
        slope = find_estimator(str(settings["estimator"])).slope
        assert slope is not None
        return [
            slope(np.where(columns["weights"] != 0, columns["references"] - log_p, 0.0))
            for log_p, columns in zip(map(np.float64, logprobs), map(precise, inputs), strict=True)
        ]


def _clips(low: float, high: float) -> dict[str, Number | Option]:
    return {"clip_low_threshold": Number(low, 0, 1), "clip_high_threshold": Number(high, 1)}


TINKER = "https://tinker-docs.thinkingmachines.ai/tinker/losses"
USED_BY_CLIPPING = "clip", ("one_side", "two_side", "ring")
USED_BY_RING = "clip", ("ring",)
USED_BY_REGULARIZER = "regularizer", ("k2", "forward_kl")

TOKEN_LOSSES: Mapping[str, TokenLoss] = {
    "importance_sampling": TokenLoss("-ratio A", TINKER, "importance_sampling", POLICY_GRADIENT),
    "ppo": TokenLoss(
        "-min(ratio A, clip(ratio) A)", "arXiv:1707.06347", "ppo", POLICY_GRADIENT, _clips(0.8, 1.2)
    ),
    "cispo": TokenLoss(
        "-sg(clip(ratio)) A log p", "arXiv:2506.13585", "cispo", POLICY_GRADIENT, _clips(0.0, 4.0)
    ),
    # Tinker's own dro has no mask: its quadratic term trains the tokens of prompts as well.
    "dro": TokenLoss(
        "-(A log p - β/2 (log p - log q)²)",
        "arXiv:2405.19107",
        settings={"beta": Number(0.05, 0)},
        weighted=weighted_losses.dro,
        regularized=lambda settings: float(settings["beta"]) > 0,
    ),
    "gspo": TokenLoss(
        "-min(s A, clip(s) A), s the geometric mean of the trajectory's ratios",
        "arXiv:2507.18071",
        "gspo",
        {**POLICY_GRADIENT, "sequence_ratio_mask": column("mask")},
        _clips(1 - 3e-4, 1 + 4e-4),
    ),
    # Weighted by advantages, cross-entropy is REINFORCE without a ratio.
    "cross_entropy": TokenLoss(
        "-A log p",
        "Williams, 1992",
        inputs={"target_tokens": column("targets"), "weights": scaled_advantages},
    ),
    # A constant factor of the advantages: cross-entropy with other weights.
    "opmd": TokenLoss(
        "-A log p / (1 + τ)",
        "arXiv:2505.17826",
        inputs={
            "target_tokens": column("targets"),
            "weights": lambda columns, settings: (
                scaled_advantages(columns, settings) / (1 + float(settings["tau"]))
            ),
        },
        settings={"tau": Number(1.0, 0)},
    ),
    "dft": TokenLoss("-sg(p) A log p", "arXiv:2508.05629", weighted=weighted_losses.dft),
    "phi": TokenLoss("-sg(p (1 - p)) A log p", "arXiv:2508.11408", weighted=weighted_losses.phi),
    "dual_clip": TokenLoss(
        "-min(ratio A, clip(ratio) A), at most -c A where A < 0",
        "arXiv:1912.09729",
        settings={**_clips(0.8, 1.2), "dual_clip": Number(3.0, 1)},
        weighted=weighted_losses.dual_clip,
    ),
    "sapo": TokenLoss(
        "-4/τ sigmoid(τ (ratio - 1)) A",
        "arXiv:2511.20347",
        settings={"tau_positive": Number(1.0, 1e-3, 1e3), "tau_negative": Number(1.05, 1e-3, 1e3)},
        weighted=weighted_losses.sapo,
    ),
    "topr": TokenLoss(
        "-sg(α) A log p, α = 1 where A > 0, else min(ratio of the trajectory, 1)",
        "arXiv:2503.14286",
        settings={"ratio": Option("trajectory", ("trajectory", "token"))},
        weighted=weighted_losses.topr,
    ),
    "sppo": TokenLoss(
        "-A log clip(ratio, 1 / (1 + ε), 1 + ε)",
        "arXiv:2108.05828",
        settings={"epsilon": Number(0.3, 1e-6)},
        weighted=weighted_losses.sppo,
    ),
    "rec": TokenLoss(
        "-sg(M w) A log p, and a regulariser",
        "arXiv:2509.24203",
        settings={
            "clip": Option("none", ("none", "one_side", "two_side", "ring")),
            "clip_low_threshold": Number(0.8, 0, 1, USED_BY_CLIPPING),
            "clip_high_threshold": Number(1.2, 1, used_by=USED_BY_CLIPPING),
            "ring_low_threshold": Number(0.4, 0, 1, USED_BY_RING),
            "ring_high_threshold": Number(3.0, 1, used_by=USED_BY_RING),
            "weight": Option("none", ("none", "ratio", "advantage")),
            "temperature": Number(1.0, 1e-3, used_by=("weight", ("advantage",))),
            "regularizer": Option("none", ("none", "k2", "forward_kl")),
            "regularizer_coefficient": Number(0.1, 1e-9, used_by=USED_BY_REGULARIZER),
        },
        weighted=weighted_losses.rec,
        regularized=lambda settings: settings["regularizer"] != "none",
    ),
}

LOSSES = ChainMap[str, Loss](
    *(
        cast("dict[str, Loss]", table)
        for table in ({DIVERGENCE: DivergenceLoss()}, DISTILLATIONS, PREFERENCES, TOKEN_LOSSES)
    )
)
"""Every loss, in the order of its tables from the last to the first."""


def loss_of(name: str) -> Loss:
    """Return the row of a loss of any kind; ValueError if there is no such row."""
    return _own_loss(name) if is_own(name) else find_row("loss", name, LOSSES)


def find_loss(name: str) -> TokenLoss:
    """Return the row of a loss of tokens; ValueError if there is no such row."""
    return _own_loss(name) if is_own(name) else find_row("loss", name, TOKEN_LOSSES)


def _own_loss(name: str) -> TokenLoss:
    """Return a row of the user's project: one that is written there, or one of its function."""

    def make(found: object) -> TokenLoss:
        if isinstance(found, TokenLoss):
            weighted = found.weighted and partial(_weigh, name, found.weighted)
            return replace(found, weighted=weighted)
        if not callable(found):
            raise OwnFunctionError(f"{name} is {found!r}, and no function; name one")
        weighted = partial(_weigh, name, cast("weighted_losses.WeightedLoss", found))
        return TokenLoss(
            str(found.__doc__ or name).partition("\n")[0],
            name,
            settings=ANY,
            weighted=weighted,
            regularized=lambda settings: bool(weighted(*_trial(0.0), settings)[1].any()),
        )

    return find_own(name, make)


def _weigh(
    name: str,
    function: weighted_losses.WeightedLoss,
    log_p: np.ndarray,
    tokens: Columns,
    settings: Settings,
) -> weighted_losses.LossAndDerivative:
    """Call a function of the project; OwnFunctionError unless each token has two numbers."""
    with calling("loss", name, "two arrays of real numbers"):
        loss, derivative = (
            np.asarray(one).astype(np.float64, casting="same_kind")
            for one in function(log_p, tokens, settings)
        )
    if not loss.shape == derivative.shape == log_p.shape or not np.isfinite(derivative).all():
        raise OwnFunctionError(
            f"the loss {name} returns arrays of shape {loss.shape} and {derivative.shape} for "
            f"{log_p.shape} log-probabilities, or a derivative that is not finite; return the loss "
            "of each token, and its derivative"
        )
    return loss, derivative


def _trial(*advantages: float) -> tuple[np.ndarray, Columns]:
    """Make tokens for a trial of a loss, at ratio 1: each advantage of a likely and a rare one."""
    given = np.tile(np.array(advantages), 2)
    log_p = np.repeat([-3.0, -0.1], len(advantages))
    return log_p, {"logprobs": log_p, "weights": np.ones_like(given), "advantages": given}


def check_loss(name: str, settings: Settings) -> None:
    """Refuse (ValueError) an unknown loss, and a setting that it would ignore.

    A function of the user's project is tried: OwnFunctionError if it is no loss.
    """
    row = find_loss(name)
    complete = complete_settings(f"the loss {name}", settings, row.settings)
    if row.weighted is None or not is_own(name) or not is_as_bound(name):
        return
    if row.settings is ANY:
        noted = NotedSettings(settings)
        row.weighted(*_trial(-1.0, 2.0), noted)
        noted.refuse_ignored(f"the loss {name}")
    for advantage in (-1.0, 2.0):
        _check_derivative(name, row.weighted, complete, advantage)


def _check_derivative(
    name: str, weighted: weighted_losses.WeightedLoss, settings: Settings, advantage: float
) -> None:
    """Refuse (OwnFunctionError) a derivative of another sign or size than its loss has.

    A factor that has no derivative, as in `phi`, changes the loss's differences too. So the loss
    may also be log p by such a factor, or have its differences by -log q instead.
    """
    log_p, sampled = np.array([[-0.011, -0.029, -0.7, -0.4], [-0.01, -0.03, -0.701, -0.399]])

    def weigh(p: np.ndarray, q: np.ndarray) -> weighted_losses.LossAndDerivative:
        given = np.full_like(p, advantage)
        tokens = {"logprobs": q.copy(), "weights": np.ones_like(p), "advantages": given}
        return weighted(p.copy(), tokens, settings)

    loss, derivative = weigh(log_p, sampled)
    slopes = _differences(lambda p: float(weigh(p, sampled)[0].sum()), log_p)
    by_q = _differences(lambda q: float(weigh(log_p, q)[0].sum()), sampled)
    off = [
        (abs(derivative - right) > 0.4 * np.maximum(abs(derivative), abs(right)))
        & (abs(slopes) > 1e-3)
        for right in (slopes, loss / log_p, -by_q)
    ]
    if np.all(np.any(off, axis=1)):
        told, right = derivative[off[0]][0], slopes[off[0]][0]
        raise OwnFunctionError(
            f"the loss {name} returns the derivative {told:.3g} where its loss has {right:.3g} by "
            f"differences: one of them has the wrong {'sign' if told * right < 0 else 'size'}, and "
            "training would not do what the loss says; mend it"
        )


def _differences(function: Callable[[np.ndarray], float], at: np.ndarray) -> np.ndarray:
    steps = np.eye(len(at)) * 1e-4
    return np.array([function(at + step) - function(at - step) for step in steps]) / 2e-4


def is_regularized(name: str, settings: Settings) -> bool:
    """Return whether tokens of zero advantage have a loss too."""
    loss = find_loss(name)
    return loss.regularized(complete_of(name, settings))


def advantage_factor(name: str, settings: Settings) -> float:
    """Return the weight of a token's log p in the loss, at ratio 1, over its advantage.

    It is 0 if the weight is not in proportion to the advantage. Otherwise a term of the advantage
    is one of the loss, with its own gradient. A service's own losses have 1 of what they are given;
    losses by weights are tried.
    """
    row = find_loss(name)
    complete = complete_of(name, settings)
    log_p, advantages = np.array([-3.0, -3.0, -0.1, -0.1]), np.array([-1.0, 2.0, -1.0, 2.0])
    columns = {"targets": np.zeros(4), "logprobs": log_p, "mask": np.ones(4), "scale": np.ones(())}

    def weigh(given: np.ndarray) -> np.ndarray:
        columns["advantages"] = given
        tokens = {key: make(columns, complete) for key, make in row.inputs.items()}
        if row.weighted is not None:
            return -row.weighted(log_p, tokens, complete)[1]
        return tokens["advantages" if "advantages" in tokens else "weights"]

    factors = (weigh(advantages) - weigh(np.zeros(4))) / advantages
    return float(factors[0]) if np.allclose(factors, factors[0]) else 0.0


def complete_of(name: str, given: Settings) -> dict[str, float | str]:
    """Return all settings of a loss; ValueError for a given setting that it does not read."""
    return complete_settings(f"the loss {name}", given, loss_of(name).settings)
