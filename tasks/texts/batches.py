"""texts → datums: the texts of a step, each token weighted by its share of the step's loss."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from adapters.calls import POLICY
from tasks.datums import SCHEMA
from tasks.examples.reading import Example
from tasks.recovery.recorded_steps import StepSource
from tasks.shards import choose
from tasks.storage.durability import durable
from tasks.storage.files import is_written
from tasks.storage.manifest import Eras
from tasks.storage.run_folder import RunFolder
from tasks.storage.tables import arrays, write
from tasks.texts.rules import TextBatch
from tasks.texts.source import Texts


@durable
def draw_texts(path: Path, texts: Texts, batch: TextBatch, step: int) -> None:
    """Write the datums of a step: its examples, drawn in passes that the seed shuffles."""
    write(datums_of_texts(texts.of_split("train"), batch, step), path)


def datums_of_texts(texts: pa.Table, batch: TextBatch, step: int) -> pa.Table:
    """Return the datums of a step, a row for each sequence of its examples."""
    rows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    columns = texts.select(["example_id", "part"]).to_pylist()
    lists = arrays(texts["tokens"]), arrays(texts["weights"])
    for row, tokens, weights in zip(columns, *lists, strict=True):
        rows[row["example_id"]].append({**row, "tokens": tokens, "weights": weights})
    chosen = choose_numbers([*rows], batch.seed, step, batch.examples)
    scales = _scales([rows[number] for number in chosen], batch)
    return pa.Table.from_pylist(
        [
            _datum(row, scale)
            for number, scale in zip(chosen, scales, strict=True)
            for row in rows[number]
        ],
        schema=SCHEMA,
    )


def choose_numbers(numbers: Sequence[int], seed: int, step: int, count: int) -> list[int]:
    """Choose the examples of a step by their numbers, in passes that the seed shuffles."""
    known: list[Example] = [{"example_id": number, "example": {}} for number in numbers]
    return [one["example_id"] for one in choose(known, seed, step, count)]


def first_numbers(numbers: Sequence[int], most: int, seed: int) -> list[int]:
    """Choose the first `most` examples in a seeded order, all if there are fewer."""
    known = [*dict.fromkeys(numbers)]
    return choose_numbers(known, seed, 0, min(most, len(known)))


def _scales(examples: Sequence[Sequence[dict[str, Any]]], batch: TextBatch) -> list[float]:
    """Return the factor of each example's loss."""
    weights = [
        float(sum(row["weights"].sum(dtype=np.float64) for row in example)) for example in examples
    ]
    match batch.normalisation:
        case "token":
            return [1 / sum(weights)] * len(weights)
        case "example":
            return [1 / (weight * len(weights)) for weight in weights]
        case "fixed":
            return [1 / (batch.divisor or 1.0)] * len(weights)


def _datum(row: dict[str, Any], scale: float) -> dict[str, Any]:
    tokens, weights = row["tokens"], row["weights"][1:]
    return {
        "rollout_id": f"{row['example_id']}.{row['part']}",
        "group_id": f"{row['example_id']}",
        "role": POLICY,
        "first_call": 0,
        "policy_version": None,
        "reward": None,
        "advantage": None,
        "tokens": tokens[:-1],
        "targets": tokens[1:],
        "logprobs": np.zeros(len(weights), np.float32),
        "advantages": weights,
        "mask": (weights > 0).astype(np.int8),
        "scale": scale,
    }


@dataclass(frozen=True)
class TextSteps(StepSource):
    """Source of the datums of a policy that is trained on texts."""

    run: RunFolder
    batches_of: Eras[TextBatch]

    def restore(self, step: int) -> None:
        path = self.run.datums(POLICY, step)
        if not is_written(path) and is_written(self.run.texts):
            draw_texts.make(path, Texts(self.run.texts), self.batches_of.at(step), step)
