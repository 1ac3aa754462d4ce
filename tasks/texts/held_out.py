"""checkpoint × texts → its loss on them, with the interval in which it lies."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot, sqrt
from math import log as natural
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
from pydantic import BaseModel

from tasks.evaluations import Z95, describe_gain
from tasks.references import Reference
from tasks.storage.durability import durable
from tasks.storage.json_files import read_json, write_json
from tasks.storage.tables import arrays
from tasks.texts.batches import choose_numbers, name_text
from tasks.texts.source import Texts


class HeldOutLoss(BaseModel, frozen=True):
    """Loss of a checkpoint on held-out texts.

    `loss` is in nats a token: Σ weight · -log p over Σ weight of all trained tokens. Its
    `standard_error` is that of a ratio of two means over examples, since tokens of one text are not
    independent (Cochran 1977, 6.4); None below two examples. `bits_per_byte` is that of the trained
    tokens over the bytes that they write, which models with different tokens can be compared by.
    """

    examples: int
    tokens: int
    loss: float
    standard_error: float | None
    interval: tuple[float, float] | None
    bits_per_byte: float
    sources: dict[str, float] = {}
    """Loss on the texts of each source, if there are several."""


@durable
def score_texts(path: Path, texts: Texts, policy: Reference, most: int, seed: int) -> None:
    """Write the loss of a policy on `most` held-out examples, the first in a seeded order."""
    table = texts.of_split("test")
    names = [*map(name_text, table.select(["source", "example_id"]).to_pylist())]
    known = [*dict.fromkeys(names)]
    drawn = {known[at] for at in choose_numbers(range(len(known)), seed, 0, min(most, len(known)))}
    table = table.filter(pa.array([name in drawn for name in names]))
    weights = arrays(table["weights"])
    last = [len(one) - int((one > 0).argmax()) for one in weights]
    scored = policy.score([one.tolist() for one in arrays(table["tokens"])], last)
    lost = [_Lost.of(*one) for one in zip(scored, weights, strict=True)]
    sources: dict[str, dict[int, list[_Lost]]] = defaultdict(lambda: defaultdict(list))
    rows = zip(table["source"].to_pylist(), table["example_id"].to_pylist(), lost, strict=True)
    for source, number, one in rows:
        sources[source][number].append(one)
    of_source = {source: [*examples.values()] for source, examples in sources.items()}
    examples = [example for of_one in of_source.values() for example in of_one]
    loss, error = _estimate(examples)
    named = {source: _estimate(of_one)[0] for source, of_one in of_source.items() if source}
    bits = sum(one.nats for one in lost) / natural(2)
    measured = HeldOutLoss(
        examples=len(examples),
        tokens=sum(one.tokens for one in lost),
        loss=loss,
        standard_error=error,
        interval=None if error is None else (loss - Z95 * error, loss + Z95 * error),
        bits_per_byte=bits / max(1, sum(table["bytes"].to_pylist())),
        sources=named,
    )
    write_json(path, measured.model_dump(exclude_defaults=True))


def read_loss(path: Path) -> HeldOutLoss:
    return HeldOutLoss.model_validate(read_json(path))


def describe_loss_gain(losses: Sequence[HeldOutLoss]) -> str:
    """Say the change from the first to the last loss, with its interval; empty without one."""
    errors = [loss.standard_error for loss in losses if loss.standard_error is not None]
    if len(losses) < 2 or len(errors) < len(losses):
        return ""
    return describe_gain(losses[0].loss, losses[-1].loss, hypot(errors[0], errors[-1]))


@dataclass(frozen=True)
class _Lost:
    """Loss of a sequence over its trained tokens: its nats, also weighted, and the weights' sum."""

    nats: float
    weighted: float
    weight: float
    tokens: int

    @classmethod
    def of(cls, logprobs: np.ndarray, weights: np.ndarray) -> Self:
        own = weights[-len(logprobs) :].astype(np.float64)
        trained = own > 0
        lost = -logprobs.astype(np.float64)[trained]
        weighted = float(own[trained] @ lost)
        return cls(float(lost.sum()), weighted, float(own.sum()), int(trained.sum()))


def _estimate(examples: Sequence[Sequence[_Lost]]) -> tuple[float, float | None]:
    """Estimate the loss by the sequences of each example, and its standard error."""
    sums = np.array([sum(one.weighted for one in own) for own in examples])
    weights = np.array([sum(one.weight for one in own) for own in examples])
    loss, count = float(sums.sum() / weights.sum()), len(examples)
    if count < 2:
        return loss, None
    residuals = sums - loss * weights
    spread = count / (count - 1) * float(residuals @ residuals)
    return loss, sqrt(spread) / float(weights.sum())
