"""The columns of the table of losses: what a row reads of a datum, derives from a batch, measures.

The rows stand in `losses.py`, `preferences.py` and `distillation.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from ratchet.tasks.algorithm.settings import Known, Settings

if TYPE_CHECKING:  # it imports the SDK, which takes a while
    from tinker.types import LossFnType

Columns = Mapping[str, np.ndarray]
"""Columns of a datum: `targets`, `logprobs`, `advantages` and `mask` of shape [targets]; `scale`,
the factor of its loss, and `sampled`, whether a policy sampled it, of shape []. A side of a pair,
and a datum with a KL penalty in the loss, have `references` of shape [targets]; a side also has its
`pair` and `side` of shape [1]; a text that has a teacher `top_tokens` and `top_logprobs` of shape
[targets · k]."""

Input = Callable[[Columns, Settings], np.ndarray]

Arrays = Sequence[np.ndarray]
"""Log-probabilities of the targets of each datum, or the loss's derivatives by them."""

LossUnit = Literal["datum", "pair"]
"""What an optimizer step never splits: a datum, or all datums of a pair."""


class Loss(ABC):
    """A row of the table of losses.

    `service_loss` is the loss of the Tinker API that the service computes from `inputs`, and with
    the row's `settings`; cross-entropy has no settings. The derivatives of a loss that is not
    `built_in` weigh the cross-entropy, whose gradient is then the gradient of the loss.
    """

    formula: str
    source: str
    settings: Known
    inputs: Mapping[str, Input]
    service_loss: "LossFnType" = "cross_entropy"
    unit: ClassVar[LossUnit] = "datum"

    @property
    def built_in(self) -> bool:
        """Whether the service computes the loss itself, of the inputs alone."""
        return False

    @abstractmethod
    def derive(
        self, settings: Settings, logprobs: Arrays, inputs: Sequence[Columns]
    ) -> list[np.ndarray]:
        """Compute the loss's derivatives by the log-probabilities of each datum, in float64."""

    def measure(
        self, settings: Settings, batch: Sequence[Columns], logprobs: Arrays
    ) -> dict[str, float]:
        """Measure the datums of a step before its update."""
        return {}

    def weights(self, batch: Sequence[Columns]) -> list[np.ndarray] | None:
        """Return by what the log-probabilities of each datum are summed; None if they are not."""
        return None

    def trained(self, datum: Columns) -> int:
        return int(datum["mask"].sum())


def column(name: str) -> Input:
    return lambda columns, _: columns[name]


def scaled_advantages(columns: Columns, _: Settings) -> np.ndarray:
    return columns["advantages"] * columns["scale"]


def scaled_mask(columns: Columns, _: Settings) -> np.ndarray:
    return columns["mask"] * columns["scale"]


def precise(columns: Columns) -> Columns:
    return {name: values.astype(np.float64) for name, values in columns.items()}
