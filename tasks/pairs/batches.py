"""pairs → datums: the pairs of a step, each side with its reference's log-probabilities."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from adapters.calls import POLICY
from tasks.algorithm.preferences import SIDES
from tasks.datums import OF_PAIRS, given_datum
from tasks.pairs.source import BoundPairs
from tasks.recovery.recorded_steps import StepSource
from tasks.storage.durability import durable
from tasks.storage.files import is_written
from tasks.storage.manifest import Eras
from tasks.storage.run_folder import RunFolder
from tasks.storage.tables import arrays, write
from tasks.texts.batches import choose_numbers


@dataclass(frozen=True)
class PairBatch:
    """Batch of a step: how many pairs it has, and the seed of their order."""

    pairs: int
    seed: int


@durable
def draw_pairs(path: Path, pairs: BoundPairs, batch: PairBatch, step: int) -> None:
    """Write the datums of a step: its pairs, drawn in passes that the seed shuffles."""
    write(datums_of_pairs(pairs.of_split("train"), batch, step), path)


def datums_of_pairs(pairs: pa.Table, batch: PairBatch, step: int) -> pa.Table:
    """Return the datums of a step, the sides of a pair one after the other."""
    places: dict[int, list[int]] = defaultdict(list)
    for place, number in enumerate(pairs["example_id"].to_pylist()):
        places[number].append(place)
    drawn = choose_numbers([*places], batch.seed, step, batch.pairs)
    taken = pairs.take([place for number in drawn for place in places[number]])
    numbers = [pair for pair, number in enumerate(drawn) for _ in places[number]]
    keys = taken.select(["example_id", "side", "part"]).to_pylist()
    lists = [arrays(taken[name]) for name in ("tokens", "mask", "references")]
    rows = [
        _datum({**key, "tokens": tokens, "mask": mask, "references": references}, pair)
        for key, pair, tokens, mask, references in zip(keys, numbers, *lists, strict=True)
    ]
    return pa.Table.from_pylist(rows, schema=OF_PAIRS)


def _datum(row: Mapping[str, Any], pair: int) -> dict[str, Any]:
    number, tokens = row["example_id"], row["tokens"]
    return {
        **given_datum(f"{number}.{row['side']}.{row['part']}", f"{number}", tokens),
        "advantages": np.zeros(len(tokens) - 1, np.float32),
        "mask": row["mask"][1:],
        "scale": 1.0,
        "pair": pair,
        "side": SIDES.index(row["side"]),
        "references": row["references"][1:],
    }


@dataclass(frozen=True)
class PairSteps(StepSource):
    """Source of the datums of a policy that learns from pairs."""

    run: RunFolder
    batches_of: Eras[PairBatch]
    has_reference: bool

    def restore(self, step: int) -> None:
        path = self.run.datums(POLICY, step)
        references = self.run.pair_references if self.has_reference else None
        if is_written(path) or not is_written(self.run.pairs):
            return
        if references is None or is_written(references):
            pairs = BoundPairs(self.run.pairs, references)
            draw_pairs.make(path, pairs, self.batches_of.at(step), step)
