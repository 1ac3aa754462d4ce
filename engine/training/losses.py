"""Tinker's built-in losses, and training datums, which are validated for a loss.

Each loss is a pure function, summed over the tokens of one datum. Notation: p is the policy being
trained, q the policy that sampled (`logprobs`), A the advantages, ratio = p / q. The formulas stand
in tinker-docs.thinkingmachines.ai/tinker/losses. Clip thresholds are bounds of the ratio itself. A
datum may give thresholds of its own, one per token, which override the config's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ratchet.engine.errors import RequestRefused
from ratchet.engine.model.language_model import LanguageModel

Inputs = Mapping[str, torch.Tensor]
Config = Mapping[str, float]
LossFunction = Callable[[Config, torch.Tensor, Inputs], torch.Tensor]

CLIPS = ("clip_low_threshold", "clip_high_threshold")


@dataclass(frozen=True, slots=True)
class EngineLoss:
    """A loss, the inputs it reads besides `target_tokens`, and its config with defaults.

    The `function` computes the scalar to minimise from the policy's log-probabilities of targets.
    """

    function: LossFunction
    required: tuple[str, ...] = ("logprobs", "advantages")
    optional: tuple[str, ...] = ()
    defaults: Config = field(default_factory=dict[str, float])


def cross_entropy(config: Config, logprobs: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Compute -Σ w log p; without weights every target counts once."""
    del config
    weights = inputs.get("weights")
    return -(logprobs if weights is None else logprobs * weights).sum()


def importance_sampling(config: Config, logprobs: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Compute -Σ ratio · A."""
    del config
    return -(_ratio(logprobs, inputs) * inputs["advantages"]).sum()


def ppo(config: Config, logprobs: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Compute -Σ min(ratio · A, clip(ratio) · A)."""
    return _clipped_objective(_ratio(logprobs, inputs), inputs, config)


def cispo(config: Config, logprobs: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Compute -Σ clip(ratio) · log p · A, without a gradient through the ratio."""
    ratio = _clip(_ratio(logprobs.detach(), inputs), inputs, config)
    return -(ratio * logprobs * inputs["advantages"]).sum()


def dro(config: Config, logprobs: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Compute -Σ (log p · A - ½ β (log p - log q)²)."""
    distance = (logprobs - inputs["logprobs"]) ** 2
    return -(logprobs * inputs["advantages"] - 0.5 * config["beta"] * distance).sum()


def gspo(config: Config, logprobs: torch.Tensor, inputs: Inputs) -> torch.Tensor:
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
    """Return a loss by name, and its complete config; raise RequestRefused if unknown."""
    if name not in LOSSES:
        raise RequestRefused(
            f"there is no loss {name!r}; choose one of {', '.join(sorted(LOSSES))}"
        )
    loss = LOSSES[name]
    complete = {**loss.defaults}
    for key, value in config.items():
        if key not in loss.defaults:
            known = ", ".join(sorted(loss.defaults)) or "no config at all"
            raise RequestRefused(f"the loss {name} has no config {key!r}; it has {known}")
        if isinstance(value, str) or not abs(value) < float("inf"):
            raise RequestRefused(f"the config {key} of the loss {name} is {value!r}, not a number")
        complete[key] = float(value)
    return loss, complete


_KNOWN = {name for loss in LOSSES.values() for name in (*loss.required, *loss.optional)}


@dataclass(frozen=True, slots=True)
class TrainingDatum:
    """Tokens [T], and the loss's inputs by name, each of the shape of `target_tokens`.

    `target_tokens` is [T], or [T, K] for K targets per position. Position i predicts token i + 1.
    """

    tokens: Sequence[int] | np.ndarray
    inputs: dict[str, np.ndarray]


def check_datums(
    data: Sequence[TrainingDatum], name: str, loss: EngineLoss, model: LanguageModel
) -> list[TrainingDatum]:
    """Return the datums as int64 and float32 arrays, without inputs that this loss does not read.

    Raise RequestRefused that names the datum, the input and the wrong value.
    """
    return [
        _DatumCheck(f"datum {number}", name, loss, model).run(datum)
        for number, datum in enumerate(data)
    ]


@dataclass(frozen=True, slots=True)
class _DatumCheck:
    where: str
    name: str
    loss: EngineLoss
    model: LanguageModel

    def run(self, datum: TrainingDatum) -> TrainingDatum:
        tokens = np.asarray(datum.tokens)
        if tokens.size == 0:
            raise RequestRefused(f"{self.where} has no tokens; give it at least one")
        self._check_vocabulary("tokens", tokens)
        if len(tokens) > self.model.max_context:
            raise RequestRefused(
                f"{self.where} has {len(tokens)} tokens, but the context of {self.model.name} ends "
                f"at {self.model.max_context}; shorten the datum"
            )
        self._check_names(datum.inputs)
        targets = self._check_targets(np.asarray(datum.inputs["target_tokens"]), len(tokens))
        inputs = {"target_tokens": targets}
        for key in (*self.loss.required, *self.loss.optional):
            if key in datum.inputs:
                inputs[key] = self._check_values(key, np.asarray(datum.inputs[key]), targets.shape)
        return TrainingDatum(tokens.astype(np.int64), inputs)

    def _check_names(self, inputs: dict[str, np.ndarray]) -> None:
        found = ", ".join(sorted(inputs)) or "nothing"
        for key in ("target_tokens", *self.loss.required):
            if key not in inputs:
                raise RequestRefused(
                    f"{self.where} has no {key}, which the loss {self.name} needs (found: {found})"
                )
        unknown = sorted(set(inputs) - _KNOWN - {"target_tokens"})
        if unknown:
            raise RequestRefused(
                f"{self.where} has the input {unknown[0]!r}, which no loss reads; remove the input"
            )

    def _check_targets(self, targets: np.ndarray, length: int) -> np.ndarray:
        if targets.ndim not in (1, 2) or targets.shape[0] != length or targets.size == 0:
            raise RequestRefused(
                f"{self.where}: target_tokens has the shape {list(targets.shape)}, expected "
                f"[{length}] or [{length}, K]: one row for each of the {length} tokens"
            )
        self._check_vocabulary("target_tokens", targets)
        return targets.astype(np.int64)

    def _check_vocabulary(self, key: str, tokens: np.ndarray) -> None:
        if tokens.dtype.kind not in "iu":
            raise RequestRefused(f"{self.where}: {key} are {tokens.dtype}; give integers")
        wrong = tokens[(tokens < 0) | (tokens >= self.model.vocab_size)]
        if wrong.size:
            raise RequestRefused(
                f"{self.where}: {key} has the token {wrong[0]}, but {self.model.name} has the "
                f"tokens 0 to {self.model.vocab_size - 1}; was it encoded with another tokenizer?"
            )

    def _check_values(self, key: str, values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        if values.shape != shape:
            raise RequestRefused(
                f"{self.where}: {key} has the shape {list(values.shape)}, but target_tokens has "
                f"{list(shape)}; give one number for each target"
            )
        values = values.astype(np.float32)
        if not np.isfinite(values).all():
            place = int(np.flatnonzero(~np.isfinite(values))[0])
            raise RequestRefused(
                f"{self.where}: {key} is {values.flat[place]} at position {place}; every value "
                "must be finite"
            )
        if key == "sequence_ratio_mask" and not values.any():
            raise RequestRefused(
                f"{self.where}: sequence_ratio_mask marks no token; mark the sampled tokens"
            )
        return values
