"""checkpoint × texts → its loss on them, with the interval in which it lies."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot, sqrt
from math import log as natural
from pathlib import Path
from typing import Literal, Self

import numpy as np
import pyarrow as pa
from pydantic import BaseModel

from tasks.evaluations import Z95, describe_gain
from tasks.references import Reference
from tasks.storage.durability import durable
from tasks.storage.json_files import read_json, write_json
from tasks.storage.tables import arrays
from tasks.texts.batches import first_numbers, name_text
from tasks.texts.source import Texts


class HeldOutMeasure(BaseModel, frozen=True):
    """Measure of a checkpoint on held-out examples that it does not play, and others beside it.

    The `value` lies in the `interval` with 95 % confidence; neither that nor the `standard_error`
    is known below two examples. `tokens` counts the trained ones of the examples.
    """

    measure: Literal["loss", "accuracy"]
    examples: int
    tokens: int
    value: float
    standard_error: float | None
    interval: tuple[float, float] | None
    beside: dict[str, float]


@durable
def score_texts(path: Path, texts: Texts, policy: Reference, most: int, seed: int) -> None:
    """Write the loss of a policy on `most` held-out examples, the first in a seeded order.

    It is in nats a token: Σ weight · -log p over Σ weight of all trained tokens. Its standard error
    is that of a ratio of two means over examples, since tokens of one text are not independent
    (Cochran 1977, 6.4). `bits_per_byte` is that of the trained tokens over the bytes that they
    write, by which models with different tokens can be compared.
    """
    table = texts.of_split("test")
    names = [*map(name_text, table.select(["source", "example_id"]).to_pylist())]
    drawn = {*first_numbers(names, most, seed)}
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
    bits = sum(one.nats for one in lost) / natural(2)
    measured = HeldOutMeasure(
        measure="loss",
        examples=len(examples),
        tokens=sum(one.tokens for one in lost),
        value=loss,
        standard_error=error,
        interval=None if error is None else (loss - Z95 * error, loss + Z95 * error),
        beside={
            "bits_per_byte": bits / max(1, sum(table["bytes"].to_pylist())),
            **{f"loss/{source}": _estimate(of)[0] for source, of in of_source.items() if source},
        },
    )
    write_json(path, measured.model_dump())


def read_measure(path: Path) -> HeldOutMeasure:
    return HeldOutMeasure.model_validate(read_json(path))


def describe_measured_gain(measured: Sequence[HeldOutMeasure]) -> str:
    """Say the change from the first to the last value, with its interval; empty without one."""
    errors = [one.standard_error for one in measured if one.standard_error is not None]
    if len(measured) < 2 or len(errors) < len(measured):
        return ""
    return describe_gain(measured[0].value, measured[-1].value, hypot(errors[0], errors[-1]))


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
