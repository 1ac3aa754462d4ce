"""Datums as they arrive → datums a loss can be computed on, or a sentence saying why not."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.errors import UserError
from engine.losses import LOSSES, Loss

if TYPE_CHECKING:
    from engine.model import LanguageModel

_KNOWN = {name for loss in LOSSES.values() for name in (*loss.required, *loss.optional)}


@dataclass(frozen=True, slots=True)
class TrainingDatum:
    """Tokens [T], and the loss's inputs by name, each of the shape of `target_tokens`.

    `target_tokens` is [T], or [T, K] for K targets a position; position i's are for token i + 1.
    """

    tokens: Sequence[int] | np.ndarray
    inputs: dict[str, np.ndarray]


def checked_datums(
    data: Sequence[TrainingDatum], name: str, loss: Loss, model: "LanguageModel"
) -> list[TrainingDatum]:
    """The same datums as int64 and float32 arrays, without the inputs this loss does not read.

    Raises UserError naming the datum, the input and the value that is wrong.
    """
    if not data:
        raise UserError("no datums were given; a forward pass needs at least one")
    return [_Check(f"datum {number}", name, loss, model).datum(datum)
            for number, datum in enumerate(data)]  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Check:
    where: str
    name: str
    loss: Loss
    model: "LanguageModel"

    def datum(self, datum: TrainingDatum) -> TrainingDatum:
        tokens = np.asarray(datum.tokens)
        if tokens.size == 0:
            raise UserError(f"{self.where} has no tokens")
        self._vocabulary("tokens", tokens)
        if len(tokens) > self.model.max_context:
            raise UserError(
                f"{self.where} has {len(tokens)} tokens, but the context of {self.model.name} ends "
                f"at {self.model.max_context}; cut it"
            )
        self._names(datum.inputs)
        targets = self._targets(np.asarray(datum.inputs["target_tokens"]), len(tokens))
        inputs = {"target_tokens": targets}
        for key in (*self.loss.required, *self.loss.optional):
            if key in datum.inputs:
                inputs[key] = self._values(key, np.asarray(datum.inputs[key]), targets.shape)
        return TrainingDatum(tokens.astype(np.int64), inputs)

    def _names(self, inputs: dict[str, np.ndarray]) -> None:
        found = ", ".join(sorted(inputs)) or "nothing"
        for key in ("target_tokens", *self.loss.required):
            if key not in inputs:
                raise UserError(
                    f"{self.where} has no {key}, which the loss {self.name} needs (found: {found})"
                )
        unknown = sorted(set(inputs) - _KNOWN - {"target_tokens"})
        if unknown:
            raise UserError(
                f"{self.where} has the input {unknown[0]!r}, which no loss reads; remove it"
            )

    def _targets(self, targets: np.ndarray, length: int) -> np.ndarray:
        if targets.ndim not in (1, 2) or targets.shape[0] != length or targets.size == 0:
            raise UserError(
                f"{self.where}: target_tokens has the shape {list(targets.shape)}, expected "
                f"[{length}] or [{length}, K]: one row for each of the {length} tokens"
            )
        self._vocabulary("target_tokens", targets)
        return targets.astype(np.int64)

    def _vocabulary(self, key: str, tokens: np.ndarray) -> None:
        if tokens.dtype.kind not in "iu":
            raise UserError(f"{self.where}: {key} are {tokens.dtype}, not integers")
        wrong = tokens[(tokens < 0) | (tokens >= self.model.vocab_size)]
        if wrong.size:
            raise UserError(
                f"{self.where}: {key} has the token {wrong[0]}, but {self.model.name} has the "
                f"tokens 0 to {self.model.vocab_size - 1}; was it encoded with another tokenizer?"
            )

    def _values(self, key: str, values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        if values.shape != shape:
            raise UserError(
                f"{self.where}: {key} has the shape {list(values.shape)}, but target_tokens has "
                f"{list(shape)}; give one number for each target"
            )
        values = values.astype(np.float32)
        if not np.isfinite(values).all():
            place = int(np.flatnonzero(~np.isfinite(values))[0])
            raise UserError(
                f"{self.where}: {key} is {values.flat[place]} at position {place}; every value "
                "must be finite"
            )
        if key == "sequence_ratio_mask" and not values.any():
            raise UserError(f"{self.where}: sequence_ratio_mask marks no token; mark the sampled")
        return values
