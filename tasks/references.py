"""trajectories → references: log-probabilities of the sampled tokens under another policy.

The other policy is the reference, or one of the teachers.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa

from tasks.examples.reading import choose_teacher
from tasks.shards import read_shard
from tasks.storage.durability import durable
from tasks.storage.names import group_name
from tasks.storage.tables import arrays, read, write

SCHEMA = pa.schema(
    [
        ("rollout_id", pa.string()),
        ("role", pa.string()),
        ("first_call", pa.int32()),
        # Aligned with the trajectory's tokens; 0 where a token was not sampled.
        ("logprobs", pa.list_(pa.float32())),
    ]
)
TEACHER = "teacher"
"""Column after those of SCHEMA where there are several teachers: the name of the row's own."""


class Reference(Protocol):
    """Policy that gives log-probabilities, as `adapters.tinker.service.PatientSampler` does."""

    def score(self, sequences: Sequence[Sequence[int]], last: Sequence[int]) -> list[np.ndarray]:
        """Return the log-probabilities of the `last` so many tokens of each sequence."""
        ...


@dataclass(frozen=True)
class References:
    """Policies that score the trajectories of a run, by name.

    Where there are several, the column `by` of an example names its own.
    """

    policies: Mapping[str, Reference]
    by: str | None = None

    def score(
        self, tokens: Sequence[Sequence[int]], last: Sequence[int], names: Sequence[str]
    ) -> list[np.ndarray]:
        """Return the log-probabilities of the `last` so many tokens, each by the policy named."""
        own: dict[str, list[int]] = defaultdict(list)
        for index, name in enumerate(names):
            own[name].append(index)
        scored: dict[int, np.ndarray] = {}
        for name, rows in own.items():
            asked = [tokens[row] for row in rows], [last[row] for row in rows]
            scored |= zip(rows, self.policies[name].score(*asked), strict=True)
        return [scored[row] for row in range(len(names))]


@durable
def compute_references(
    path: Path, trajectories: Path, references: References, shards: Sequence[Path] = ()
) -> None:
    """Write the log-probabilities of a file of trajectories under the references, in its order.

    The service computes all trajectories in parallel, each from its first sampled token on. The
    `shards` have the examples, by which the teacher of a trajectory is chosen. A ValueError names a
    trajectory with a token that its reference can never sample, since the divergence is infinite.
    """
    table = read(trajectories)
    tokens, masks = (arrays(table[name]) for name in ("tokens", "mask"))
    names = _names(table, references, shards)
    trained = [index for index, mask in enumerate(masks) if mask.any()]
    last = [len(masks[index]) - int(masks[index].argmax()) for index in trained]
    asked = [tokens[index].tolist() for index in trained], last, [names[i] for i in trained]
    logprobs = [np.zeros(len(mask), np.float32) for mask in masks]
    for index, values in zip(trained, references.score(*asked), strict=True):
        if not np.isfinite(values[masks[index][-len(values) :] != 0]).all():
            raise ValueError(
                f"{names[index]} gives a token of {table['rollout_id'][index]} no finite "
                "log-probability; give another algorithm.kl.reference or algorithm.teacher"
            )
        logprobs[index][-len(values) :] = values
    columns = [table[name].combine_chunks() for name in SCHEMA.names[:-1]]
    masked = [np.where(mask != 0, found, 0.0) for mask, found in zip(masks, logprobs, strict=True)]
    columns.append(pa.array(masked, SCHEMA.field("logprobs").type))
    made = pa.table(columns, schema=SCHEMA)
    if references.by is not None:
        made = made.append_column(TEACHER, pa.array(names, pa.string()))
    write(made, path)


def _names(table: pa.Table, references: References, shards: Sequence[Path]) -> list[str]:
    """Name the reference of each trajectory, by the example of its group."""
    if references.by is None:
        [name] = references.policies
        return [name] * table.num_rows
    named = {
        group_name(shard.stem, index): choose_teacher(
            row["example"], references.by, references.policies
        )
        for shard in shards
        for index, row in enumerate(read_shard(shard))
    }
    return [named[group] for group in table["group_id"].to_pylist()]


def reference_logprobs(references: pa.Table, trajectories: pa.Table) -> list[np.ndarray]:
    """Return the log-probabilities of each trajectory's tokens under its reference.

    Raises ValueError if the references are not those of the trajectories.
    """
    names = SCHEMA.names[:-1]
    logprobs = arrays(references["logprobs"])
    lengths = [len(mask) for mask in arrays(trajectories["mask"])]
    same = references.select(names).to_pylist() == trajectories.select(names).to_pylist()
    if not same or [len(values) for values in logprobs] != lengths:
        raise ValueError(
            "the references of a step are not those of its trajectories; remove the file of the "
            "references, and it is made again"
        )
    return logprobs
