"""tokens × another policy → what it finds at the places where a token is trained.

The other policy is a reference, a teacher, or the sampler of the policy that is trained. Of
trajectories its log-probabilities are a file, the references of a step.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from ratchet.adapters.calls import Refused
from ratchet.adapters.errors import UserError
from ratchet.adapters.rendering.chat import Chat
from ratchet.tasks.examples.reading import SYSTEM_ROLE, choose_teacher, fill_reads, read_before
from ratchet.tasks.examples.shards import read_shard
from ratchet.tasks.storage.durability import durable
from ratchet.tasks.storage.files import verified
from ratchet.tasks.storage.names import group_name
from ratchet.tasks.storage.tables import arrays, query_beside, read_table, select, write_table

QUERY = query_beside(__file__)
REFERENCE_SCHEMA = pa.schema(
    [
        ("rollout_id", pa.string()),
        ("role", pa.string()),
        ("first_call", pa.int32()),
        # Aligned with the trajectory's tokens; 0 where a token was not sampled.
        ("logprobs", pa.list_(pa.float32())),
    ]
)
TEACHER = "teacher"
"""Last column where there are several teachers: the name of the row's own teacher."""

SCORED_AT_ONCE = 256
"""Sequences that another policy is asked for at once; it computes them in parallel."""

A = TypeVar("A")
F = TypeVar("F")


class Reference(Protocol):
    """Policy that gives log-probabilities, as `adapters.tinker.service.PatientSampler` does."""

    def score(self, sequences: Sequence[Sequence[int]], last: Sequence[int]) -> list[np.ndarray]:
        """Return the log-probabilities of the `last[i]` last tokens of sequence i."""
        ...


class LikeliestScorer(Protocol):
    """Policy that gives its likeliest tokens, as `adapters.tinker.service.PatientSampler` does."""

    def score_likeliest(
        self, sequences: Sequence[Sequence[int]], last: Sequence[int], k: int
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the k likeliest tokens at the `last` places of each sequence."""
        ...


def score_tokens(
    score: Callable[[Sequence[Sequence[int]], Sequence[A]], list[F]],
    tokens: Iterable[np.ndarray],
    asked: Iterable[A],
) -> Iterator[F]:
    """Yield what a policy finds in each sequence of tokens, by what is asked of each.

    The tokens are taken, and asked for, SCORED_AT_ONCE sequences at a time.
    """
    rows = zip(tokens, asked, strict=True)
    while part := [*islice(rows, SCORED_AT_ONCE)]:
        read, of_each = zip(*part, strict=True)
        yield from score([one.tolist() for one in read], of_each)


def score_trained(
    policy: Reference, tokens: Iterable[np.ndarray], masks: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Return a policy's log-probabilities of the trained tokens, 0 at the others.

    They are aligned with the masks. What the policy reads ends with the tokens of the masks, and
    may begin with more. Sequences without a trained token are not asked for.
    """
    read = (own for own, mask in zip(tokens, masks, strict=True) if mask.any())
    last = count_from_first([mask for mask in masks if mask.any()])
    scored = score_tokens(policy.score, read, last)
    found = [np.zeros(len(mask), np.float32) for mask in masks]
    for aligned, mask in zip(found, masks, strict=True):
        if mask.any():
            values = next(scored)
            own = mask[-len(values) :] != 0
            aligned[-len(values) :][own] = values[own]
    return found


def count_from_first(masks: Sequence[np.ndarray]) -> list[int]:
    """Count the tokens of each sequence from its first trained one on."""
    return [len(mask) - int((mask != 0).argmax()) for mask in masks]


@dataclass(frozen=True)
class Reads:
    """Text that teachers read before the conversation, with columns of the example."""

    text: str
    chat: Chat

    def before(
        self, tokens: np.ndarray, example: Mapping[str, Any], origin: Mapping[str, Any]
    ) -> np.ndarray:
        """Return a trajectory's tokens with the text before the messages of its first call.

        UserError if the renderer takes no such messages, or is not the recorded renderer.
        """
        messages, tools = json.loads(origin["messages"]), json.loads(origin["tools"])
        if origin["instructions"] is not None:
            messages.append({"role": SYSTEM_ROLE, "content": origin["instructions"]})
        if self.chat.render(messages, tools) != origin["prompt_token_ids"]:
            raise UserError(
                f"the renderer {self.chat.renderer} writes a recorded prompt otherwise than it was "
                "sampled from, so that algorithm.teacher.reads has no place before it; train by "
                "the renderer of the record, or leave reads out"
            )
        try:
            prompt = self.chat.render(read_before(fill_reads(self.text, example), messages), tools)
        except (Refused, ValueError) as error:
            raise UserError(
                f"the renderer {self.chat.renderer} takes no system message ({error}), as which a "
                "teacher reads algorithm.teacher.reads; leave it out, or give another "
                "model.renderer"
            ) from error
        return np.array([*prompt, *tokens[len(origin["prompt_token_ids"]) :]])


@dataclass(frozen=True)
class References:
    """Policies that score the trajectories of a run, by name.

    Where there are several policies, the column `by` of an example names its policy. They may read
    a text before a conversation that the trained policy does not read.
    """

    policies: Mapping[str, Reference]
    by: str | None = None
    reads: Reads | None = None


@durable
def compute_references(
    path: Path,
    trajectories: Path,
    references: References,
    shards: Sequence[Path] = (),
    spans: Sequence[Path] = (),
) -> None:
    """Write the log-probabilities of a file of trajectories under the references, in its order.

    The `shards` have the examples, which name the teacher of a trajectory. The `spans` have the
    conversations: a teacher that reads more than the policy has its prompt made from them. A
    ValueError names a trajectory with a token that its reference can never sample, since the
    divergence is infinite.
    """
    table = read_table(trajectories)
    tokens, masks = (arrays(table[name]) for name in ("tokens", "mask"))
    examples = _examples(table, shards) if references.by or references.reads else []
    names = _names(table, references, examples)
    reads, origins = references.reads, None
    if reads is not None:
        origins = select(QUERY, trajectories=verified(trajectories), spans=[*map(verified, spans)])

    def read(row: int) -> np.ndarray:
        if reads is None or origins is None:
            return tokens[row]
        [origin] = origins.slice(row, 1).to_pylist()
        return reads.before(tokens[row], examples[row], origin)

    rows: dict[str, list[int]] = defaultdict(list)
    for row, name in enumerate(names):
        rows[name] += [row] if masks[row].any() else []
    scored = [np.zeros(len(mask), np.float32) for mask in masks]
    for name, own in rows.items():
        found = score_trained(references.policies[name], map(read, own), [masks[r] for r in own])
        for row, values in zip(own, found, strict=True):
            if not np.isfinite(values).all():
                raise ValueError(
                    f"{name} gives a token of {table['rollout_id'][row]} no finite "
                    "log-probability; give another algorithm.kl.reference or algorithm.teacher"
                )
            scored[row] = values
    columns = [table[name].combine_chunks() for name in REFERENCE_SCHEMA.names[:-1]]
    columns.append(pa.array(scored, REFERENCE_SCHEMA.field("logprobs").type))
    made = pa.table(columns, schema=REFERENCE_SCHEMA)
    if references.by is not None:
        made = made.append_column(TEACHER, pa.array(names, pa.string()))
    write_table(made, path)


def _examples(table: pa.Table, shards: Sequence[Path]) -> list[Mapping[str, Any]]:
    named = {
        group_name(shard.stem, index): row["example"]
        for shard in shards
        for index, row in enumerate(read_shard(shard))
    }
    return [named[group] for group in table["group_id"].to_pylist()]


def _names(
    table: pa.Table, references: References, examples: Sequence[Mapping[str, Any]]
) -> list[str]:
    if references.by is None:
        [name] = references.policies
        return [name] * table.num_rows
    return [choose_teacher(one, references.by, references.policies) for one in examples]


def reference_logprobs(references: pa.Table, trajectories: pa.Table) -> list[np.ndarray]:
    """Return the log-probabilities of each trajectory's tokens under its reference.

    Raises ValueError if the references belong to other trajectories.
    """
    names = REFERENCE_SCHEMA.names[:-1]
    logprobs = arrays(references["logprobs"])
    lengths = [len(mask) for mask in arrays(trajectories["mask"])]
    same = references.select(names).to_pylist() == trajectories.select(names).to_pylist()
    if not same or [len(values) for values in logprobs] != lengths:
        raise ValueError(
            "the references of a step belong to other trajectories; remove the file of the "
            "references, and it is made again"
        )
    return logprobs
