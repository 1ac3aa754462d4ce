"""The table of losses: what each reads, which settings it has, and how it is computed.

A loss is a row of LOSSES. A service computes a *built-in* loss in one forward-backward pass. A loss
*by weights* takes a forward pass more: its log-probabilities go into a function of
`tasks.algorithm.weighted_losses`, and the derivative that comes out weighs cross-entropy, whose
gradient is then that of the loss. Losses are summed over tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tasks.algorithm import weighted_losses
from tasks.algorithm.distillation import DISTILLATIONS, NONE, Distillation
from tasks.algorithm.divergences import (
    DIVERGENCE,
    IN_LOSS,
    DivergenceEstimator,
    find_estimator,
)
from tasks.algorithm.preferences import PREFERENCES, Preference, derivatives, pair_tokens
from tasks.algorithm.settings import Known, Number, Option, Settings, complete_settings, find_row

if TYPE_CHECKING:  # they import torch, which takes seconds
    from tinker.types import LossFnType

    from adapters.tinker.live_policy import ServiceLoss

Columns = Mapping[str, np.ndarray]
"""Columns of a datum: `targets`, `logprobs`, `advantages` and `mask` of shape [targets]; `scale`,
the factor of its loss, of shape []. A side of a pair, and a datum with a KL penalty in the loss,
have `references` of shape [targets]; a side also has its `pair` and `side` of shape [1]; a text
that has a teacher `top_tokens` and `top_logprobs` of shape [targets · k]."""

Input = Callable[[Columns, Settings], np.ndarray]


def _column(name: str) -> Input:
    return lambda columns, _: columns[name]


def _scaled_advantages(columns: Columns, _: Settings) -> np.ndarray:
    return columns["advantages"] * columns["scale"]


POLICY_GRADIENT: Mapping[str, Input] = {
    "target_tokens": _column("targets"),
    "logprobs": _column("logprobs"),
    "advantages": _scaled_advantages,
}
WEIGHTED: Mapping[str, Input] = {
    "target_tokens": _column("targets"),
    "weights": lambda columns, _: columns["mask"] * columns["scale"],
    "logprobs": _column("logprobs"),
    "advantages": _column("advantages"),
}
"""Inputs of a loss by weights: the service gets the first two, the function all of them."""
PAIRED: Mapping[str, Input] = {
    "target_tokens": _column("targets"),
    "weights": _column("mask"),
    "references": _column("references"),
    "pair": _column("pair"),
    "side": _column("side"),
}
"""Inputs of a preference loss, as those of a loss by weights."""

REFERRED: Mapping[str, Input] = {
    "target_tokens": _column("targets"),
    "weights": lambda columns, _: columns["mask"] * columns["scale"],
    "references": _column("references"),
}
"""Inputs of a KL penalty in the loss, as those of a loss by weights."""


def _of_top(name: str) -> Input:
    return lambda columns, _: columns[name].reshape(len(columns["targets"]), -1)


def _weights_of_top(columns: Columns, settings: Settings) -> np.ndarray:
    weights = columns["mask"] * _scaled_advantages(columns, settings)
    top = _of_top("top_logprobs")(columns, settings)
    return np.where(top > NONE, weights[:, None], 0.0)


DISTILLED: Mapping[str, Input] = {
    "target_tokens": _of_top("top_tokens"),
    "weights": _weights_of_top,
    "top_logprobs": _of_top("top_logprobs"),
}
"""Inputs of a distillation loss, as those of a loss by weights, of shape [targets, k]."""


@dataclass(frozen=True)
class Loss:
    """A row of the table.

    `service_loss` is the loss of the Tinker API that the service computes from `inputs`, and with
    the row's `settings` unless it is cross-entropy, which has none. A loss by weights has a
    function, `weighted`. `regularized` is whether, with these settings, sampled tokens of zero
    advantage have a loss too.
    """

    formula: str
    source: str
    service_loss: "LossFnType" = "cross_entropy"
    inputs: Mapping[str, Input] = field(default_factory=lambda: WEIGHTED)
    settings: Known = field(default_factory=dict[str, Number | Option])
    weighted: weighted_losses.WeightedLoss | None = None
    regularized: Callable[[Settings], bool] = lambda _: False


def _clips(low: float, high: float) -> dict[str, Number | Option]:
    return {"clip_low_threshold": Number(low, 0, 1), "clip_high_threshold": Number(high, 1)}


TINKER = "https://tinker-docs.thinkingmachines.ai/tinker/losses"
CLIPPED = "clip", ("one_side", "two_side", "ring")
RING = "clip", ("ring",)
REGULARIZED = "regularizer", ("k2", "forward_kl")

LOSSES: Mapping[str, Loss] = {
    "importance_sampling": Loss("-ratio A", TINKER, "importance_sampling", POLICY_GRADIENT),
    "ppo": Loss(
        "-min(ratio A, clip(ratio) A)", "arXiv:1707.06347", "ppo", POLICY_GRADIENT, _clips(0.8, 1.2)
    ),
    "cispo": Loss(
        "-sg(clip(ratio)) A log p", "arXiv:2506.13585", "cispo", POLICY_GRADIENT, _clips(0.0, 4.0)
    ),
    # Tinker's own dro has no mask: its quadratic term trains the tokens of prompts as well.
    "dro": Loss(
        "-(A log p - β/2 (log p - log q)²)",
        "arXiv:2405.19107",
        settings={"beta": Number(0.05, 0)},
        weighted=weighted_losses.dro,
        regularized=lambda settings: float(settings["beta"]) > 0,
    ),
    "gspo": Loss(
        "-min(s A, clip(s) A), s the geometric mean of the trajectory's ratios",
        "arXiv:2507.18071",
        "gspo",
        {**POLICY_GRADIENT, "sequence_ratio_mask": _column("mask")},
        _clips(1 - 3e-4, 1 + 4e-4),
    ),
    # Weighted by advantages, cross-entropy is REINFORCE without a ratio.
    "cross_entropy": Loss(
        "-A log p",
        "Williams, 1992",
        inputs={"target_tokens": _column("targets"), "weights": _scaled_advantages},
    ),
    # A constant factor of the advantages: cross-entropy with other weights.
    "opmd": Loss(
        "-A log p / (1 + τ)",
        "arXiv:2505.17826",
        inputs={
            "target_tokens": _column("targets"),
            "weights": lambda columns, settings: (
                _scaled_advantages(columns, settings) / (1 + float(settings["tau"]))
            ),
        },
        settings={"tau": Number(1.0, 0)},
    ),
    "dft": Loss("-sg(p) A log p", "arXiv:2508.05629", weighted=weighted_losses.dft),
    "phi": Loss("-sg(p (1 - p)) A log p", "arXiv:2508.11408", weighted=weighted_losses.phi),
    "dual_clip": Loss(
        "-min(ratio A, clip(ratio) A), at most -c A where A < 0",
        "arXiv:1912.09729",
        settings={**_clips(0.8, 1.2), "dual_clip": Number(3.0, 1)},
        weighted=weighted_losses.dual_clip,
    ),
    "sapo": Loss(
        "-4/τ sigmoid(τ (ratio - 1)) A",
        "arXiv:2511.20347",
        settings={"tau_positive": Number(1.0, 1e-3, 1e3), "tau_negative": Number(1.05, 1e-3, 1e3)},
        weighted=weighted_losses.sapo,
    ),
    "topr": Loss(
        "-sg(α) A log p, α = 1 where A > 0, else min(ratio of the trajectory, 1)",
        "arXiv:2503.14286",
        settings={"ratio": Option("trajectory", ("trajectory", "token"))},
        weighted=weighted_losses.topr,
    ),
    "sppo": Loss(
        "-A log clip(ratio, 1 / (1 + ε), 1 + ε)",
        "arXiv:2108.05828",
        settings={"epsilon": Number(0.3, 1e-6)},
        weighted=weighted_losses.sppo,
    ),
    "rec": Loss(
        "-sg(M w) A log p, and a regulariser",
        "arXiv:2509.24203",
        settings={
            "clip": Option("none", ("none", "one_side", "two_side", "ring")),
            "clip_low_threshold": Number(0.8, 0, 1, CLIPPED),
            "clip_high_threshold": Number(1.2, 1, used_by=CLIPPED),
            "ring_low_threshold": Number(0.4, 0, 1, RING),
            "ring_high_threshold": Number(3.0, 1, used_by=RING),
            "weight": Option("none", ("none", "ratio", "advantage")),
            "temperature": Number(1.0, 1e-3, used_by=("weight", ("advantage",))),
            "regularizer": Option("none", ("none", "k2", "forward_kl")),
            "regularizer_coefficient": Number(0.1, 1e-9, used_by=REGULARIZED),
        },
        weighted=weighted_losses.rec,
        regularized=lambda settings: settings["regularizer"] != "none",
    ),
}


def find_loss(name: str) -> Loss:
    """Return the row of a loss; ValueError if there is none."""
    return find_row("loss", name, LOSSES)


def inputs_of(name: str) -> tuple[Mapping[str, Input], Known]:
    """Return what a loss reads of a datum, and its settings; ValueError if there is none."""
    if name in PREFERENCES:
        return PAIRED, PREFERENCES[name].settings
    if name in DISTILLATIONS:
        return DISTILLED, {}
    if name == DIVERGENCE:
        return REFERRED, {"estimator": Option(IN_LOSS[0], IN_LOSS)}
    loss = find_loss(name)
    return loss.inputs, loss.settings


def check_loss(name: str, settings: Settings) -> None:
    """Refuse (ValueError) an unknown loss, and a setting that it would ignore."""
    complete_settings(f"the loss {name}", settings, find_loss(name).settings)


def is_regularized(name: str, settings: Settings) -> bool:
    """Return whether tokens of zero advantage have a loss too."""
    loss = find_loss(name)
    return loss.regularized(complete_settings(f"the loss {name}", settings, loss.settings))


def advantage_factor(name: str, settings: Settings) -> float:
    """Return the weight of a token's log p in the loss, at ratio 1, over its advantage.

    It is 0 if the weight is not in proportion to the advantage. Otherwise a term of the advantage
    is one of the loss, with its own gradient. A service's own losses have 1 of what they are given;
    losses by weights are tried.
    """
    row = find_loss(name)
    complete = complete_settings(f"the loss {name}", settings, row.settings)
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


def service_loss(name: str, settings: Settings) -> "ServiceLoss":
    from adapters.tinker.live_policy import ServiceLoss

    if name in PREFERENCES:
        row = PREFERENCES[name]
        complete = complete_settings(f"the loss {name}", settings, row.settings)
        return ServiceLoss("cross_entropy", {}, partial(_preference_derivative, row, complete))
    if name in DISTILLATIONS:
        derivative = partial(_distillation_derivative, DISTILLATIONS[name])
        return ServiceLoss("cross_entropy", {}, derivative)
    if name == DIVERGENCE:
        derivative = partial(_divergence_derivative, find_estimator(str(settings["estimator"])))
        return ServiceLoss("cross_entropy", {}, derivative)
    loss = find_loss(name)
    complete = complete_settings(f"the loss {name}", settings, loss.settings)
    sent = {} if loss.service_loss == "cross_entropy" else complete
    numbers = {key: float(value) for key, value in sent.items()}
    derivative = loss.weighted and partial(_derivative, loss.weighted, complete)
    return ServiceLoss(loss.service_loss, numbers, derivative)


def _derivative(
    function: weighted_losses.WeightedLoss,
    settings: Settings,
    logprobs: Sequence[np.ndarray],
    inputs: Sequence[Columns],
) -> list[np.ndarray]:
    """Compute the derivatives of a loss by weights, in double precision."""
    return [
        function(log_p.astype(np.float64), _precise(tokens), settings)[1]
        for log_p, tokens in zip(logprobs, inputs, strict=True)
    ]


def _preference_derivative(
    row: Preference,
    settings: Settings,
    logprobs: Sequence[np.ndarray],
    inputs: Sequence[Columns],
) -> list[np.ndarray]:
    """Compute the derivatives of a preference loss, in double precision."""
    tokens = pair_tokens([_precise(columns) for columns in inputs])
    return derivatives(row, settings, tokens, [log_p.astype(np.float64) for log_p in logprobs])


def _distillation_derivative(
    row: Distillation, logprobs: Sequence[np.ndarray], inputs: Sequence[Columns]
) -> list[np.ndarray]:
    """Compute the derivatives of a distillation loss, in double precision."""
    return [
        row.function(log_p.astype(np.float64), _precise(columns)["top_logprobs"])[1]
        for log_p, columns in zip(logprobs, inputs, strict=True)
    ]


def _divergence_derivative(
    row: DivergenceEstimator, logprobs: Sequence[np.ndarray], inputs: Sequence[Columns]
) -> list[np.ndarray]:
    """Compute the derivatives of a KL penalty in the loss, in double precision."""
    assert row.slope is not None
    return [
        row.slope(np.where(columns["weights"] != 0, columns["references"] - log_p, 0.0))
        for log_p, columns in zip(map(np.float64, logprobs), map(_precise, inputs), strict=True)
    ]


def _precise(columns: Columns) -> Columns:
    return {name: values.astype(np.float64) for name, values in columns.items()}
