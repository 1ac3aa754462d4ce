"""What a recipe says of texts: what of them is trained, how long they may be, and their batches."""

from dataclasses import dataclass
from typing import Literal

Trained = Literal["last_message", "last_turn", "assistant", "marked", "all"]
"""Part of a conversation that is trained."""

TooLong = Literal["refuse", "cut", "leave_out"]
"""Treatment of a text with too many tokens."""

Normalisation = Literal["token", "example", "fixed"]
"""Divisor of a step's loss: its trained tokens, each example's and the examples, or a number."""

TextLoss = Literal["cross_entropy", "dft", "phi"]
"""Losses of texts, which are rows of `tasks.algorithm.losses.LOSSES`."""

TRAIN, TEST = "train", "test"
"""Splits, however a file calls the second one."""

ALONE = ""
"""Name of a source that is the only one."""

Shares = tuple[tuple[str, int], ...]
WHOLE: Shares = ((ALONE, 1),)


@dataclass(frozen=True)
class TextRules:
    """Rules by which texts become tokens: what is trained, and what becomes of long ones."""

    trained: Trained
    most_tokens: int
    too_long: TooLong


@dataclass(frozen=True)
class TextBatch:
    """Batch of a step: how many examples it has, in what order, and what their loss is divided by.

    The loss is the sum over tokens of weight × negative log-probability. `token` divides it by the
    sum of the step's weights; `example` divides each example's by the sum of its own, and by the
    number of examples; `fixed` divides it by the `divisor`. `shares` are the sources of the texts,
    each with its part of every batch: how many of their sum it has.
    """

    examples: int
    seed: int
    normalisation: Normalisation
    divisor: float | None = None
    shares: Shares = WHOLE
