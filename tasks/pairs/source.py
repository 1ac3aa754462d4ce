"""comparisons → the tokens of their sides, and what the reference gives them: two files."""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from adapters.rendering.chat import Chat
from tasks.algorithm.preferences import MISMATCHED, PREFERENCES, find_preference
from tasks.examples.reading import DatasetError, Source
from tasks.pairs.reading import PairSides, read_pair
from tasks.references import Reference
from tasks.storage.durability import durable
from tasks.storage.files import is_written, remove_folder
from tasks.storage.tables import arrays, read, write
from tasks.texts.conversations import read_unpadded
from tasks.texts.rules import TextRules
from tasks.texts.source import describe_counts
from tasks.texts.tokenizing import WeightedTokens

SCHEMA = pa.schema(
    [
        ("split", pa.string()),
        ("example_id", pa.int32()),
        ("side", pa.string()),
        # Number of the sequence, of a side whose tokens do not grow throughout.
        ("part", pa.int32()),
        ("tokens", pa.list_(pa.int32())),
        # Aligned with the tokens: 1 where a token is trained.
        ("mask", pa.list_(pa.int8())),
    ]
)

KEYS = ["split", "example_id", "side", "part"]

REFERENCES = pa.schema(
    [*(SCHEMA.field(name) for name in KEYS), ("logprobs", pa.list_(pa.float32()))]
)
"""Rows as those of SCHEMA, aligned with their tokens; 0 where a token is not trained."""

MOST_TOLD = 3
"""Broken rows of a split of which the log says what is wrong; the others are counted."""

SCORED_AT_ONCE = 128
"""Sequences of which the log-probabilities are computed in parallel."""

log = logging.getLogger(__name__)


class PairSource(Protocol):
    """Source of pairs: its name in messages, and the two sides of each pair."""

    @property
    def name(self) -> str: ...

    def __len__(self) -> int: ...

    def pairs(self, chat: Chat) -> Iterator[tuple[int, PairSides | str]]:
        """Yield the number of each pair and its sides, or why it is left out."""
        ...


@dataclass(frozen=True)
class WrittenPairs:
    """Pairs that are rows of a split."""

    rows: Source

    @property
    def name(self) -> str:
        return f"the split '{self.rows.split}' of {self.rows.dataset}"

    def __len__(self) -> int:
        return len(self.rows.examples())

    def pairs(self, chat: Chat) -> Iterator[tuple[int, PairSides | str]]:
        broken = 0
        for row in read_unpadded(self.rows):
            number = row["example_id"]
            try:
                yield number, read_pair(row["example"], chat) or "ties"
            except DatasetError as error:
                broken += 1
                if broken <= MOST_TOLD:
                    log.warning("row %d of %s is left out: %s", number, self.rows.dataset, error)
                yield number, "broken"


class BoundPairs:
    """The pairs of a run as tokens, with the reference's log-probabilities, read once."""

    def __init__(self, path: Path, references: Path | None = None) -> None:
        self.path = path
        self._references = references

    def of_split(self, split: str) -> pa.Table:
        """Return the rows of a split in SCHEMA, with the column `references`, in their order."""
        return self._table.filter(pc.field("split") == split)

    @cached_property
    def _table(self) -> pa.Table:
        table = read(self.path)
        if self._references is None:
            lists = [np.zeros(len(one), np.float32) for one in arrays(table["mask"])]
            return table.append_column("references", pa.array(lists, pa.list_(pa.float32())))
        return table.append_column("references", read(self._references)["logprobs"])


@durable
def bind_pairs(
    path: Path, sources: Mapping[str, PairSource], chat: Chat, rules: TextRules, loss: str
) -> None:
    """Write the tokens of the pairs of each split, and log what was cut or left out.

    A pair is left out whole. If the loss reads mismatched sides, each pair has a third one: its
    prompt with the answers to the next other prompt, one for each of its own. DatasetError names a
    split that has no pair, and a labelled answer of which the loss says nothing.
    """
    rows: list[dict[str, object]] = []
    for split, source in sources.items():
        counts: Counter[str] = Counter()
        kept: list[tuple[int, PairSides]] = []
        for number, sides in kept_pairs(source, chat, rules, counts):
            if sides.labelled and not find_preference(loss).labelled:
                _refuse_labelled(f"row {number} of {source.name}", loss)
            kept.append((number, sides))
        if not kept:
            raise DatasetError(
                f"{source.name} has 0 pairs that can be compared ({describe_counts(counts)}); give "
                "1 or more"
            )
        log.info("%s: %s", source.name, describe_counts(counts))
        rows += _rows(split, kept)
        if find_preference(loss).mismatched:
            rows += _mismatched_rows(split, kept, rules.most_tokens)
    write(pa.Table.from_pylist(rows, schema=SCHEMA), path)


@durable
def score_references(path: Path, pairs: Path, reference: Reference, parts: Path) -> None:
    """Write the reference's log-probabilities of the trained tokens of every side.

    A part of SCORED_AT_ONCE sides is first a file in the folder `parts`, which is named after its
    rows, so that an interrupted scoring goes on with the next part. DatasetError names a pair with
    a token that the reference can never sample.
    """
    table, scored = read(pairs), list[pa.Table]()
    for first in range(0, table.num_rows, SCORED_AT_ONCE):
        rows = table.slice(first, SCORED_AT_ONCE)
        part = parts / f"{first:07d}-{first + rows.num_rows:07d}.parquet"
        if not is_written(part):
            write(_score(rows, reference), part)
            log.info("the reference has scored %d of %d sides", first + len(rows), len(table))
        scored.append(read(part))
    write(pa.concat_tables(scored), path)
    remove_folder(parts)


def _score(rows: pa.Table, reference: Reference) -> pa.Table:
    """Return the reference's log-probabilities of some sides, in REFERENCES."""
    scored = score_sides(reference, arrays(rows["tokens"]), arrays(rows["mask"]))
    for number, values in zip(rows["example_id"].to_pylist(), scored, strict=True):
        if not np.isfinite(values).all():
            raise DatasetError(
                f"the reference gives a token of pair {number} no finite log-probability; leave "
                "that pair out, or give another preference.reference"
            )
    lists = pa.array(scored, REFERENCES.field("logprobs").type)
    return rows.select(KEYS).append_column("logprobs", lists).cast(REFERENCES)


def score_sides(
    policy: Reference, tokens: Sequence[np.ndarray], masks: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Return a policy's log-probabilities of the trained tokens of sequences, 0 elsewhere."""
    last = [len(mask) - int(mask.argmax()) for mask in masks]
    scored = policy.score([one.tolist() for one in tokens], last)
    whole = []
    for mask, values in zip(masks, scored, strict=True):
        padded = np.zeros(len(mask), np.float32)
        padded[-len(values) :] = values
        whole.append(np.where(mask != 0, padded, np.float32(0)))
    return whole


def kept_pairs(
    source: PairSource, chat: Chat, rules: TextRules, counts: Counter[str]
) -> Iterator[tuple[int, PairSides]]:
    """Yield the pairs that can be compared, each with its number."""
    for number, sides in source.pairs(chat):
        if isinstance(sides, str):
            counts["pairs"] += 1
            counts[f"left out: {sides}"] += 1
            continue
        counts["labelled answers" if sides.labelled else "pairs"] += 1
        both = [*sides.chosen, *sides.rejected]
        longest = max((len(one.tokens) for one in both), default=0)
        if longest > rules.most_tokens and rules.too_long == "refuse":
            raise DatasetError(
                f"pair {number} of {source.name} has a side of {longest} tokens, and "
                f"dataset.most_tokens is {rules.most_tokens}; give more, or dataset.too_long cut "
                "or leave_out"
            )
        if longest > rules.most_tokens and rules.too_long == "leave_out":
            counts["left out: too long"] += 1
            continue
        chosen, rejected = (
            _cut(side, rules.most_tokens) for side in (sides.chosen, sides.rejected)
        )
        kept = PairSides(chosen, rejected, sides.labelled)
        if len(kept.given()) < 2 - kept.labelled:
            counts["left out: a side without a trained token"] += 1
        elif kept.chosen == kept.rejected:
            counts["left out: identical sides"] += 1
        else:
            counts["cut"] += longest > rules.most_tokens
            counts["sides without their end"] += sum(
                side[-1].tokens[-1] not in chat.stop_tokens for side in kept.given().values()
            )
            yield number, kept


def _cut(side: Sequence[WeightedTokens], most: int) -> list[WeightedTokens]:
    """Cut the sequences of a side, and drop those in which nothing is trained then."""
    cut = [WeightedTokens(one.tokens[:most], one.weights[:most]) for one in side]
    return [one for one in cut if any(one.weights)]


def _rows(split: str, kept: Sequence[tuple[int, PairSides]]) -> Iterator[dict[str, object]]:
    for number, sides in kept:
        for side, sequences in sides.given().items():
            for part, sequence in enumerate(sequences):
                yield _row(split, number, side, part, sequence)


def _mismatched_rows(
    split: str, kept: Sequence[tuple[int, PairSides]], most: int
) -> Iterator[dict[str, object]]:
    """Yield each prompt with answers to the next other one; DatasetError if all are the same.

    A pair has two, that of each side, so that what is good and what is bad count alike; to a
    labelled answer that lacks a side, its only one.
    """
    split_at = [
        {name: _split_at_answer(side[0]) for name, side in sides.given().items()}
        for _, sides in kept
    ]
    prompts = [next(iter(sides.values()))[0] for sides in split_at]
    if all(prompt == prompts[0] for prompt in prompts):
        raise DatasetError(
            f"the pairs of the split {split} have one prompt, and this loss compares its answers "
            "with those to others; give pairs of 2 prompts or more"
        )
    for place, ((number, sides), prompt) in enumerate(zip(kept, prompts, strict=True)):
        following = chain(range(place, len(kept)), range(place))
        others = split_at[next(at for at in following if prompts[at] != prompt)]
        for part, name in enumerate(sides.given()):
            _, answer = others.get(name) or next(iter(others.values()))
            tokens = [*prompt.tokens, *answer.tokens][:most]
            weights = [*prompt.weights, *answer.weights][:most]
            yield _row(split, number, MISMATCHED, part, WeightedTokens(tokens, weights))


def _split_at_answer(sequence: WeightedTokens) -> tuple[WeightedTokens, WeightedTokens]:
    """Split a sequence before its first trained token."""
    first = next(at for at, weight in enumerate(sequence.weights) if weight)
    prompt, answer = (
        WeightedTokens(sequence.tokens[own], sequence.weights[own])
        for own in (slice(first), slice(first, None))
    )
    return prompt, answer


def _refuse_labelled(row: str, loss: str) -> None:
    able = " or ".join(name for name, known in PREFERENCES.items() if known.labelled)
    raise DatasetError(
        f"{row} is a labelled answer, and preference.loss {loss} compares two; give "
        f"preference.loss {able}, or rows of chosen and rejected"
    )


def _row(
    split: str, number: int, side: str, part: int, sequence: WeightedTokens
) -> dict[str, object]:
    return {
        "split": split,
        "example_id": number,
        "side": side,
        "part": part,
        "tokens": np.array(sequence.tokens, np.int32),
        "mask": (np.array(sequence.weights) > 0).astype(np.int8),
    }
