"""checkpoint × texts → its loss on them, with the interval in which it lies."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log as natural
from math import sqrt
from pathlib import Path
from typing import Literal, Protocol, Self

import numpy as np
import pyarrow as pa
from pydantic import BaseModel

from tasks.algorithm.distillation import NONE, find_distillation
from tasks.comparison.statistics import Z95, Gain, find_gain, find_unpaired_gain
from tasks.references import Reference
from tasks.storage.durability import durable
from tasks.storage.json_files import read_json, write_json
from tasks.storage.tables import arrays
from tasks.texts.batches import choose_first, name_text, spread_cells
from tasks.texts.rules import TEST
from tasks.texts.source import Texts


class HeldOutMeasure(BaseModel, frozen=True):
    """Measure of a checkpoint on held-out examples that it does not play, and others beside it.

    The `value` lies in the `interval` with 95 % confidence; neither that nor the `standard_error`
    is known below two examples. `tokens` counts the trained ones of the examples. `by_example` has
    each example's part of the value and its weight, whose sums' ratio the value is; empty in older
    measures.
    """

    measure: Literal["loss", "accuracy"]
    examples: int
    tokens: int
    value: float
    standard_error: float | None
    interval: tuple[float, float] | None
    beside: dict[str, float]
    by_example: tuple[tuple[float, float], ...] = ()


class ChosenScorer(Protocol):
    """Policy that gives log-probabilities of any tokens, as `PatientSampler` does."""

    def score_chosen(
        self, sequences: Sequence[Sequence[int]], chosen: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Return the log-probabilities of chosen tokens at the last places of each sequence."""
        ...


@durable
def score_texts(path: Path, texts: Texts, policy: Reference, most: int, seed: int) -> None:
    """Write the loss of a policy on `most` held-out examples, the first in a seeded order.

    It is in nats a token: Σ weight · -log p over Σ weight of all trained tokens. `bits_per_byte` is
    that of the trained tokens over the bytes that they write, by which models with different tokens
    can be compared.
    """
    table, last = _drawn(texts, most, seed)
    scored = policy.score([one.tolist() for one in arrays(table["tokens"])], last)
    lost = [
        _Lost.of(-log_p, own) for log_p, own in zip(scored, arrays(table["weights"]), strict=True)
    ]
    bits = sum(one.nats for one in lost) / natural(2)
    _write_loss(
        path, table, lost, {"bits_per_byte": bits / max(1, sum(table["bytes"].to_pylist()))}
    )


@durable
def score_taught(
    path: Path, texts: Texts, policy: ChosenScorer, most: int, seed: int, divergence: str
) -> None:
    """Write the divergence of a policy from the teacher, as `score_texts` writes the loss."""
    table, last = _drawn(texts, most, seed)
    losses = zip(_diverge(policy, table, last, divergence), arrays(table["weights"]), strict=True)
    _write_loss(path, table, [_Lost.of(*one) for one in losses], {})


def _drawn(texts: Texts, most: int, seed: int) -> tuple[pa.Table, list[int]]:
    """Return the rows of the examples that are scored, and how many places of each are."""
    table = texts.of_split(TEST)
    names = [*map(name_text, table.select(["source", "example_id"]).to_pylist())]
    drawn = choose_first(names, most, seed)
    table = table.filter(pa.array([name in drawn for name in names]))
    return table, [len(one) - int((one > 0).argmax()) for one in arrays(table["weights"])]


def _write_loss(
    path: Path, table: pa.Table, lost: "Sequence[_Lost]", beside: Mapping[str, float]
) -> None:
    """Write the loss over the examples of a table.

    Its standard error is that of a ratio of two means over examples, since tokens of one text are
    not independent (Cochran 1977, 6.4).
    """
    sources: dict[str, dict[int, list[_Lost]]] = defaultdict(lambda: defaultdict(list))
    rows = zip(table["source"].to_pylist(), table["example_id"].to_pylist(), lost, strict=True)
    for source, number, one in rows:
        sources[source][number].append(one)
    of_source = {source: [*examples.values()] for source, examples in sources.items()}
    examples = [example for of_one in of_source.values() for example in of_one]
    loss, error = _estimate(examples)
    named = {source: _estimate(of_one)[0] for source, of_one in of_source.items() if source}
    measured = HeldOutMeasure(
        measure="loss",
        examples=len(examples),
        tokens=sum(one.tokens for one in lost),
        value=loss,
        standard_error=error,
        interval=None if error is None else (loss - Z95 * error, loss + Z95 * error),
        beside={**beside, **{f"loss/{source}": loss for source, loss in named.items()}},
        by_example=tuple(map(_sum, examples)),
    )
    write_json(path, measured.model_dump())


def _diverge(
    policy: ChosenScorer, table: pa.Table, last: Sequence[int], divergence: str
) -> list[np.ndarray]:
    """Return the divergence from the teacher at the `last` so many places of each sequence."""
    trained = [one[-count:] > 0 for one, count in zip(arrays(table["weights"]), last, strict=True)]
    likeliest, log_q = (
        [spread_cells(*one, empty) for one in zip(arrays(table[name]), trained, strict=True)]
        for name, empty in (("top_tokens", 0), ("top_logprobs", NONE))
    )
    chosen = [np.where(q > NONE, top, -1) for top, q in zip(likeliest, log_q, strict=True)]
    log_p = policy.score_chosen([one.tolist() for one in arrays(table["tokens"])], chosen)
    function = find_distillation(divergence).function
    pairs = zip(log_p, log_q, strict=True)
    return [function(p.astype(np.float64), q.astype(np.float64))[0] for p, q in pairs]


def read_measure(path: Path) -> HeldOutMeasure:
    return HeldOutMeasure.model_validate(read_json(path))


def find_measured_gain(first: HeldOutMeasure, last: HeldOutMeasure) -> Gain | None:
    """Find the change from one measure of a run's held-out examples to another; None if unknown."""
    before, after = ([*zip(*one.by_example, strict=True)] for one in (first, last))
    if not before or not after or before[1] != after[1]:
        return find_unpaired_gain(*((one.value, one.standard_error) for one in (first, last)))
    return find_gain(before[0], after[0], before[1])


@dataclass(frozen=True)
class _Lost:
    """Loss of a sequence over its trained tokens: its nats, also weighted, and the weights' sum."""

    nats: float
    weighted: float
    weight: float
    tokens: int

    @classmethod
    def of(cls, losses: np.ndarray, weights: np.ndarray) -> Self:
        own = weights[-len(losses) :].astype(np.float64)
        trained = own > 0
        lost = losses.astype(np.float64)[trained]
        weighted = float(own[trained] @ lost)
        return cls(float(lost.sum()), weighted, float(own.sum()), int(trained.sum()))


def _sum(example: Sequence[_Lost]) -> tuple[float, float]:
    """Sum the weighted loss of an example's sequences, and the weights."""
    return sum(one.weighted for one in example), sum(one.weight for one in example)


def _estimate(examples: Sequence[Sequence[_Lost]]) -> tuple[float, float | None]:
    """Estimate the loss by the sequences of each example, and its standard error."""
    sums, weights = np.array([_sum(own) for own in examples]).T
    loss, count = float(sums.sum() / weights.sum()), len(examples)
    if count < 2:
        return loss, None
    residuals = sums - loss * weights
    spread = count / (count - 1) * float(residuals @ residuals)
    return loss, sqrt(spread) / float(weights.sum())
