"""Our side of the comparison: the rows of our tables, applied to its inputs."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.peers.inputs import DISCOUNT, Call, Tokens
from ratchet.engine.training.losses import resolve_loss
from ratchet.tasks.algorithm.advantages import Earned, estimate_advantages
from ratchet.tasks.algorithm.losses import find_loss
from ratchet.tasks.algorithm.preferences import SIDES, Pairs, Side, find_preference
from ratchet.tasks.algorithm.settings import Settings, complete_settings
from ratchet.tasks.credit import penalties_of, returns_to_go
from ratchet.tasks.datums import Term
from ratchet.tasks.settings.algorithm import Divergence


@dataclass(frozen=True)
class Computed:
    """The losses of trajectories, each a sum over its tokens, and their gradients by token."""

    losses: list[float]
    gradients: list[list[float]]


def compute_losses(name: str, settings: Settings, trajectories: Sequence[Tokens]) -> Computed:
    """Compute a row of LOSSES, as the service would or by its function of weights."""
    pairs = [_compute_loss(name, settings, tokens) for tokens in trajectories]
    return Computed([loss for loss, _ in pairs], [gradient.tolist() for _, gradient in pairs])


def compute_preferences(
    name: str, given: Settings, sums: Mapping[str, Mapping[str, Sequence[float]]]
) -> Computed:
    """Compute a row of PREFERENCES: the mean loss, and its gradients by log p of each side."""
    row = find_preference(name)
    chosen, rejected, mismatched = (
        Side(**{key: np.array(values) for key, values in sums[side].items()}) for side in SIDES
    )
    pairs = Pairs(chosen, rejected, mismatched)
    loss, *slopes = row.function(pairs, complete_settings(name, given, row.settings))
    return Computed([float(loss.mean())], [(slope / len(pairs)).tolist() for slope in slopes])


def compute_advantages(name: str, settings: Settings, calls: Sequence[Call]) -> list[float]:
    """Compute a row of ADVANTAGES, an advantage a call; a reward of calls is discounted."""
    groups: dict[str, dict[str, list[Call]]] = defaultdict(lambda: defaultdict(list))
    for call in calls:
        groups[f"{call['task']}"][f"{call['task']}-{call['run']}"].append(call)
    earned = {
        group: {rollout: _earnings(of) for rollout, of in rollouts.items()}
        for group, rollouts in groups.items()
    }
    advantages = estimate_advantages(earned, name, settings)
    return [advantages[f"{call['task']}-{call['run']}"][call["call"]] for call in calls]


OF_TEXTS = ("dft", "phi")
"""Losses of texts, in which every trained token has the weight 1."""


def estimate_divergences(name: str, trajectories: Sequence[Tokens]) -> list[list[float]]:
    """Estimate by a row of ESTIMATORS the divergence at each token, 0 where none is sampled."""
    return [
        values.tolist()
        for values in _penalties(Divergence(coefficient=1, estimator=name), trajectories)
    ]


def lessen_advantages(penalty: Divergence, trajectories: Sequence[Tokens]) -> list[list[float]]:
    """Lessen the advantages of tokens by their penalties, from which the mean is taken first."""
    masks = [np.array(tokens["mask"]) for tokens in trajectories]
    penalties = _penalties(penalty, trajectories)
    mean = sum(values.sum() for values in penalties) / sum(mask.sum() for mask in masks)
    return [
        (np.array(tokens["advantages"]) - (values - mean) * mask).tolist()
        for tokens, values, mask in zip(trajectories, penalties, masks, strict=True)
    ]


def _penalties(penalty: Divergence, trajectories: Sequence[Tokens]) -> list[np.ndarray]:
    return [
        penalties_of(
            penalty,
            np.array(tokens["sampling_logprobs"]),
            np.array(tokens["reference_logprobs"]),
            np.array(tokens["mask"]),
        )
        for tokens in trajectories
    ]


def _compute_loss(name: str, settings: Settings, tokens: Tokens) -> tuple[float, np.ndarray]:
    row, asked = find_loss(name), Term(name, settings).service_loss()
    complete = complete_settings(f"the loss {name}", settings, row.settings)
    columns = {
        "targets": np.zeros(len(tokens["mask"])),
        "logprobs": np.array(tokens["sampling_logprobs"]),
        "advantages": np.array(tokens["mask" if name in OF_TEXTS else "advantages"]),
        "mask": np.array(tokens["mask"]),
        "scale": np.array(1.0),
    }
    inputs = {name: make(columns, complete) for name, make in row.inputs.items()}
    log_p = np.array(tokens["logprobs"])
    if row.weighted is not None:
        loss, derivative = row.weighted(log_p, inputs, complete)
        return float((loss * inputs["weights"]).sum()), derivative * inputs["weights"]
    engine_loss, config = resolve_loss(asked.name, asked.settings)
    leaf = torch.tensor(log_p, requires_grad=True)
    given = {name: torch.tensor(values) for name, values in inputs.items()}
    value = engine_loss.function(config, leaf, given)
    value.backward()
    assert leaf.grad is not None
    return value.item(), leaf.grad.numpy()


def _earnings(calls: Sequence[Call]) -> list[Earned]:
    rewards = [call["call_reward"] for call in calls]
    return [
        Earned(returned, sum(rewards), len(call["logprobs"]), call["state"])
        for call, returned in zip(calls, returns_to_go(rewards, DISCOUNT), strict=True)
    ]
