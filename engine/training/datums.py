"""Training datums, and their validation for a loss."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ratchet.engine.errors import RequestRefused
from ratchet.engine.model.language_model import LanguageModel
from ratchet.engine.training.losses import LOSSES, EngineLoss

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
    if not data:
        raise RequestRefused("no datums were given; a forward pass needs at least one")
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
