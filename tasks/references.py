"""trajectories → references: log-probabilities of the sampled tokens under a reference policy."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa

from tasks.storage.durability import durable
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


class Reference(Protocol):
    """Policy that gives log-probabilities, as `adapters.tinker.service.PatientSampler` does."""

    def score(self, sequences: Sequence[Sequence[int]], last: Sequence[int]) -> list[np.ndarray]:
        """Return the log-probabilities of the `last` so many tokens of each sequence."""
        ...


@durable
def compute_references(path: Path, trajectories: Path, reference: Reference) -> None:
    """Write the reference's log-probabilities of a file of trajectories, in the same order.

    The service computes all trajectories in parallel, each from its first sampled token on. A
    ValueError names a trajectory with a token that the reference can never sample, since its
    divergence is infinite.
    """
    table = read(trajectories)
    tokens, masks = (arrays(table[name]) for name in ("tokens", "mask"))
    trained = [index for index, mask in enumerate(masks) if mask.any()]
    last = [len(masks[index]) - int(masks[index].argmax()) for index in trained]
    scored = reference.score([tokens[index].tolist() for index in trained], last)
    logprobs = [np.zeros(len(mask), np.float32) for mask in masks]
    for index, values in zip(trained, scored, strict=True):
        if not np.isfinite(values[masks[index][-len(values) :] != 0]).all():
            raise ValueError(
                f"the reference gives a token of {table['rollout_id'][index]} no finite "
                "log-probability; give another algorithm.kl.reference"
            )
        logprobs[index][-len(values) :] = values
    columns = [table[name].combine_chunks() for name in SCHEMA.names[:-1]]
    masked = [np.where(mask != 0, found, 0.0) for mask, found in zip(masks, logprobs, strict=True)]
    lists = pa.array(masked, SCHEMA.field("logprobs").type)
    write(pa.table([*columns, lists], schema=SCHEMA), path)


def reference_logprobs(references: pa.Table, trajectories: pa.Table) -> list[np.ndarray]:
    """Return the reference's log-probabilities of each trajectory's tokens.

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
