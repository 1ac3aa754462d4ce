"""Tinker's built-in losses.

Each loss is a pure function, summed over the tokens of one datum. Notation: p is the policy being
trained, q the policy that sampled (`logprobs`), A the advantages, ratio = p / q. The formulas stand
in tinker-docs.thinkingmachines.ai/tinker/losses. Clip thresholds are bounds of the ratio itself. A
datum may give thresholds of its own, one per token, which override the config's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from ratchet.engine.errors import RequestRefused

Inputs = Mapping[str, torch.Tensor]
Config = Mapping[str, float]
LossFunction = Callable[[torch.Tensor, Inputs, Config], torch.Tensor]

CLIPS = ("clip_low_threshold", "clip_high_threshold")


@dataclass(frozen=True, slots=True)
class EngineLoss:
    """A loss, the inputs it reads besides `target_tokens`, and its config with defaults."""

    function: LossFunction
    required: tuple[str, ...] = ("logprobs", "advantages")
    optional: tuple[str, ...] = ()
    defaults: Config = field(default_factory=dict[str, float])

    def __call__(self, logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
        """Compute the scalar to minimise from the policy's log-probabilities of the targets."""
        return self.function(logprobs, inputs, {**self.defaults, **config})


def cross_entropy(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """Compute -Σ w log p; without weights every target counts once."""
    del config
    weights = inputs.get("weights")
    return -(logprobs if weights is None else logprobs * weights).sum()


def importance_sampling(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """Compute -Σ ratio · A."""
    del config
    return -(_ratio(logprobs, inputs) * inputs["advantages"]).sum()


def ppo(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """Compute -Σ min(ratio · A, clip(ratio) · A)."""
    return _clipped_objective(_ratio(logprobs, inputs), inputs, config)


def cispo(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """Compute -Σ clip(ratio) · log p · A, without a gradient through the ratio."""
    ratio = _clip(_ratio(logprobs.detach(), inputs), inputs, config)
    return -(ratio * logprobs * inputs["advantages"]).sum()


def dro(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """Compute -Σ (log p · A - ½ β (log p - log q)²)."""
    distance = (logprobs - inputs["logprobs"]) ** 2
    return -(logprobs * inputs["advantages"] - 0.5 * config["beta"] * distance).sum()


def gspo(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """Compute PPO's objective with one ratio per sequence.

    The ratio is exp of the mean of log p - log q over the tokens that `sequence_ratio_mask` marks.
    Each token has this value, and its own gradient.
    """
    marked = inputs["sequence_ratio_mask"] != 0
    own = logprobs.detach()
    log_ratio = (own - inputs["logprobs"])[marked].mean()
    return _clipped_objective(torch.exp(log_ratio + logprobs - own), inputs, config)


def _ratio(logprobs: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    return torch.exp(logprobs - inputs["logprobs"])


def _clip(ratio: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    low, high = (inputs.get(name, ratio.new_tensor(config[name])) for name in CLIPS)
    return torch.minimum(torch.maximum(ratio, low), high)


def _clipped_objective(ratio: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    advantages = inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clip(ratio, inputs, config) * advantages).sum()


def _clips(low: float, high: float) -> Config:
    return dict(zip(CLIPS, (low, high), strict=True))


LOSSES: Mapping[str, EngineLoss] = {
    "cross_entropy": EngineLoss(cross_entropy, required=(), optional=("weights",)),
    "importance_sampling": EngineLoss(importance_sampling),
    "ppo": EngineLoss(ppo, optional=CLIPS, defaults=_clips(0.8, 1.2)),
    "cispo": EngineLoss(cispo, optional=CLIPS, defaults=_clips(0.0, 4.0)),
    # Tinker documents no default; 0.05 is the value in its example.
    "dro": EngineLoss(dro, defaults={"beta": 0.05}),
    # Tinker documents no default; these are the bounds of the paper (Zheng et al., 2025).
    "gspo": EngineLoss(
        gspo,
        required=("logprobs", "advantages", "sequence_ratio_mask"),
        optional=CLIPS,
        defaults=_clips(1 - 3e-4, 1 + 4e-4),
    ),
}


def resolve_loss(name: str, config: Mapping[str, float | str]) -> tuple[EngineLoss, Config]:
    """Return a loss by name, and its checked config; raise RequestRefused if unknown."""
    if name not in LOSSES:
        raise RequestRefused(
            f"there is no loss {name!r}; choose one of {', '.join(sorted(LOSSES))}"
        )
    loss = LOSSES[name]
    checked: dict[str, float] = {}
    for key, value in config.items():
        if key not in loss.defaults:
            known = ", ".join(sorted(loss.defaults)) or "no config at all"
            raise RequestRefused(f"the loss {name} has no config {key!r}; it has {known}")
        if isinstance(value, str) or not abs(value) < float("inf"):
            raise RequestRefused(f"the config {key} of the loss {name} is {value!r}, not a number")
        checked[key] = float(value)
    return loss, checked
