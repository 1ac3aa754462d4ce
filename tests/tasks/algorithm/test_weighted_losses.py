"""Losses by weights: their derivatives are those of the formulas, as autograd computes them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ratchet.tasks.algorithm.losses import TOKEN_LOSSES
from ratchet.tasks.algorithm.settings import Option, Settings, complete_settings
from ratchet.tasks.datums import Term

Formula = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Any], torch.Tensor]

BY_WEIGHTS = [name for name, loss in TOKEN_LOSSES.items() if loss.weighted]


def dro(log_p: torch.Tensor, log_q: torch.Tensor, a: torch.Tensor, s: Any) -> torch.Tensor:
    return -(log_p * a - 0.5 * s["beta"] * (log_p - log_q).square())


def dual_clip(log_p: torch.Tensor, log_q: torch.Tensor, a: torch.Tensor, s: Any) -> torch.Tensor:
    ratio = (log_p - log_q).exp()
    clipped = ratio.clamp(s["clip_low_threshold"], s["clip_high_threshold"])
    ppo = -torch.minimum(ratio * a, clipped * a)
    return torch.where(a < 0, torch.minimum(ppo, -s["dual_clip"] * a), ppo)


def sapo(log_p: torch.Tensor, log_q: torch.Tensor, a: torch.Tensor, s: Any) -> torch.Tensor:
    tau = torch.where(a > 0, s["tau_positive"], s["tau_negative"])
    return -torch.sigmoid(tau * ((log_p - log_q).exp() - 1)) * 4 / tau * a


def topr(log_p: torch.Tensor, log_q: torch.Tensor, a: torch.Tensor, s: Any) -> torch.Tensor:
    apart = (log_p - log_q).detach()
    ratio = (apart if s["ratio"] == "token" else apart.sum()).exp()
    return -torch.where(a > 0, torch.ones_like(a), ratio.clamp(0, 1)) * a * log_p


def sppo(log_p: torch.Tensor, log_q: torch.Tensor, a: torch.Tensor, s: Any) -> torch.Tensor:
    ratio = (log_p - log_q).exp()
    return -a * ratio.clamp(1 / (1 + s["epsilon"]), 1 + s["epsilon"]).log()


def rec(log_p: torch.Tensor, log_q: torch.Tensor, a: torch.Tensor, s: Any) -> torch.Tensor:
    ratio = (log_p - log_q).exp().detach()
    low, high = ratio < s["clip_low_threshold"], ratio > s["clip_high_threshold"]
    dropped = {
        "none": torch.zeros_like(low),
        "two_side": low | high,
        "one_side": (low & (a < 0)) | (high & (a >= 0)),
        "ring": (low | high)
        & ~((a >= 0) & (ratio <= s["ring_low_threshold"]))
        & ~((a <= 0) & (ratio >= s["ring_high_threshold"])),
    }[s["clip"]]
    weight = {"none": 1.0, "ratio": ratio, "advantage": (a / s["temperature"]).exp()}[s["weight"]]
    loss = -torch.where(dropped, 0.0, 1.0) * weight * a * log_p
    if s["regularizer"] == "k2":
        loss = loss + s["regularizer_coefficient"] * (log_p - log_q).square()
    if s["regularizer"] == "forward_kl":
        loss = loss - s["regularizer_coefficient"] * log_p
    return loss


def dft(log_p: torch.Tensor, log_q: torch.Tensor, a: torch.Tensor, s: Any) -> torch.Tensor:
    return -log_p.exp().detach() * a * log_p


def phi(log_p: torch.Tensor, log_q: torch.Tensor, a: torch.Tensor, s: Any) -> torch.Tensor:
    p = log_p.exp().detach()
    return -(p - p.square()) * a * log_p


FORMULAS: dict[str, Formula] = {
    "dft": dft,
    "phi": phi,
    "dro": dro,
    "dual_clip": dual_clip,
    "sapo": sapo,
    "topr": topr,
    "sppo": sppo,
    "rec": rec,
}


def cases() -> list[tuple[str, Settings]]:
    """Every loss by weights with its defaults, and with each name of each of its choices."""
    chosen = []
    for name in BY_WEIGHTS:
        chosen.append((name, {}))
        for setting, known in TOKEN_LOSSES[name].settings.items():
            if isinstance(known, Option):
                others = [choice for choice in known.names if choice != known.default]
                chosen += [(name, {setting: choice}) for choice in others]
    return chosen


def test_every_loss_by_weights_has_a_formula_here() -> None:
    assert FORMULAS.keys() == set(BY_WEIGHTS)


values = st.floats(-2, 2, allow_nan=False).map(lambda value: round(value, 3) + 0.0004)
"""Numbers at which no ratio lies on a threshold, where a derivative has two sides."""


@pytest.mark.parametrize(("name", "settings"), cases(), ids=str)
@given(data=st.data())
def test_loss_and_derivative_are_those_of_the_formula(
    name: str, settings: Settings, data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, 6))
    log_p, log_q, a = (
        data.draw(arrays(np.float64, size, elements=values)) - shift for shift in (2.1, 2.0, 0.0)
    )
    row = TOKEN_LOSSES[name]
    assert row.weighted is not None
    complete = complete_settings(name, settings, row.settings)
    tokens = {"logprobs": log_q, "advantages": a, "weights": np.ones(size)}
    loss, derivative = row.weighted(log_p, tokens, complete)
    at = torch.tensor(log_p, requires_grad=True)
    given_by = FORMULAS[name](at, torch.tensor(log_q), torch.tensor(a), complete)
    given_by.sum().backward()
    np.testing.assert_allclose(loss, given_by.detach().numpy(), rtol=1e-6, atol=1e-9)
    assert at.grad is not None
    np.testing.assert_allclose(derivative, at.grad.numpy(), rtol=1e-6, atol=1e-9)


def test_a_target_that_is_not_trained_is_not_of_the_trajectory_s_ratio() -> None:
    derivative = Term("topr", {}).service_loss().derivative
    assert derivative is not None
    tokens = {
        "logprobs": np.array([0.0, -1.0]),
        "advantages": np.array([0.0, -1.0]),
        "weights": np.array([0.0, 1.0]),
    }
    (slope,) = derivative([np.array([-9.0, -2.0])], [tokens])
    assert slope[1] == pytest.approx(np.exp(-1.0))
