"""units × another policy → what it finds: likeliest tokens of a teacher, scores of a reference.

Files of some rows each let an interrupted scoring go on with the next one.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from ratchet.adapters.rendering.chat import Chat
from ratchet.tasks.algorithm.distillation import NO_TOKEN
from ratchet.tasks.examples.reading import DatasetError
from ratchet.tasks.given.given import GivenSource, Unit
from ratchet.tasks.given.pairs import PAIR_KEYS, REFERENCES
from ratchet.tasks.given.texts import TAUGHT, TEXT_KEYS, Texts
from ratchet.tasks.given.tokenizing import WeightedTokens
from ratchet.tasks.references import Reference, from_first, score_rows
from ratchet.tasks.settings.given import TRAIN
from ratchet.tasks.storage.durability import durable
from ratchet.tasks.storage.files import is_written, remove_folder
from ratchet.tasks.storage.tables import arrays, read_table, write_table

SCORED_AT_ONCE = 128
"""Sides of pairs that a reference scores in parallel."""

log = logging.getLogger(__name__)


class LikeliestScorer(Protocol):
    """Policy that gives its likeliest tokens, as `adapters.tinker.service.PatientSampler` does."""

    def score_likeliest(
        self, sequences: Sequence[Sequence[int]], last: Sequence[int], k: int
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the k likeliest tokens at the `last` places of each sequence."""
        ...


class LongerTexts:
    """Texts for a teacher that reads more than the policy: the same texts, but longer."""

    def __init__(self, sources: Mapping[str, GivenSource], chat: Chat) -> None:
        self._sources, self._chat = sources, chat

    def tokens(self, row: Mapping[str, Any], ending: Sequence[int]) -> list[int]:
        """Return the tokens of a row, with its `ending`, its tokens from the first trained one on.

        DatasetError if the renderer writes these otherwise behind what the teacher reads.
        """
        longer = self._sequences.get(tuple(row[name] for name in TEXT_KEYS))
        if longer is not None:
            first = next(at for at, weight in enumerate(longer.weights) if weight > 0)
            end = first + len(ending)
            if longer.tokens[first:end] == [*ending]:
                return longer.tokens[:end]
        raise DatasetError(
            f"the renderer {self._chat.renderer} writes text {row['example_id']} otherwise behind "
            "what its teacher reads; leave teacher.reads out, or give another model.renderer"
        )

    @cached_property
    def _sequences(self) -> Mapping[tuple[Any, ...], WeightedTokens]:
        found: dict[tuple[Any, ...], WeightedTokens] = {}
        for name, source in self._sources.items():
            for number, unit in source.units(self._chat):
                if isinstance(unit, DatasetError):
                    raise unit
                sequences = unit.sequences() if isinstance(unit, Unit) else ()
                for part, sequence in enumerate(sequences):
                    found[*name.partition("/")[::2], number, part] = sequence
        return found


def ask_teacher(
    texts: Texts, teacher: LikeliestScorer, k: int, longer: LongerTexts | None = None
) -> None:
    """Write a teacher's likeliest tokens in the texts, a file a part, unless it is there."""
    for part in range(len(texts.parts())):
        score_part(texts.parts()[part], texts, part, teacher, k, longer)
    taught = texts.of_split(TRAIN)
    covered = np.exp(np.concatenate(arrays(taught["top_logprobs"])), dtype=np.float64).reshape(
        -1, k
    )
    log.info(
        "the teacher has read %d tokens to train; its %d likeliest cover %.4f at %d places",
        sum(taught["read"].to_pylist()),
        k,
        covered.sum(1).mean(),
        len(covered),
    )


@durable
def score_part(
    path: Path,
    texts: Texts,
    part: int,
    teacher: LikeliestScorer,
    k: int,
    longer: LongerTexts | None,
) -> None:
    """Write a teacher's k likeliest tokens at the trained places of a part of the texts.

    DatasetError names a text with a place for which the teacher gives no token.
    """
    rows = texts.of_part(part)
    keys = rows.select(TEXT_KEYS).to_pylist()
    own = [one.tolist() for one in arrays(rows["tokens"])]
    trained = [weights > 0 for weights in arrays(rows["weights"])]
    last = from_first(trained)
    if longer is not None:
        pairs = zip(keys, own, last, strict=True)
        own = [longer.tokens(key, tokens[-count:]) for key, tokens, count in pairs]
    made = []
    scored = teacher.score_likeliest(own, last, k)
    for key, tokens, mask, (top, logprobs) in zip(keys, own, trained, scored, strict=True):
        kept = mask[-len(top) :]
        found = np.where(np.isfinite(logprobs), logprobs, NO_TOKEN)[kept]
        if not (found > NO_TOKEN).any(1).all():
            raise DatasetError(
                f"the teacher gives no likely token at a trained place of text "
                f"{key['example_id']}; leave that text out, or give another teacher.model"
            )
        lists = {"top_tokens": top[kept].ravel(), "top_logprobs": found.ravel()}
        made.append({**key, "read": len(tokens), **lists})
    write_table(pa.Table.from_pylist(made, schema=TAUGHT), path)


@durable
def score_references(path: Path, pairs: Path, reference: Reference, parts: Path) -> None:
    """Write the reference's log-probabilities of the trained tokens of every side.

    A part of SCORED_AT_ONCE sides is first a file of the folder `parts`; the file is named after
    its rows. DatasetError names a pair with a token that the reference can never sample.
    """
    table, scored = read_table(pairs), list[pa.Table]()
    for first in range(0, table.num_rows, SCORED_AT_ONCE):
        rows = table.slice(first, SCORED_AT_ONCE)
        part = parts / f"{first:07d}-{first + rows.num_rows:07d}.parquet"
        if not is_written(part):
            write_table(_score(rows, reference), part)
            log.info("the reference has scored %d of %d sides", first + len(rows), len(table))
        scored.append(read_table(part))
    write_table(pa.concat_tables(scored), path)
    remove_folder(parts)


def _score(rows: pa.Table, reference: Reference) -> pa.Table:
    """Return the reference's log-probabilities of some sides, in REFERENCES."""
    scored = score_rows(reference.score, arrays(rows["tokens"]), arrays(rows["mask"]))
    for number, values in zip(rows["example_id"].to_pylist(), scored, strict=True):
        if not np.isfinite(values).all():
            raise DatasetError(
                f"the reference gives a token of pair {number} no finite log-probability; leave "
                "that pair out, or give another preference.reference"
            )
    lists = pa.array(scored, REFERENCES.field("logprobs").type)
    return rows.select(PAIR_KEYS).append_column("logprobs", lists).cast(REFERENCES)
