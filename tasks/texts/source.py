"""texts → their tokens: one file, written once, of which every step of a run is made."""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from adapters.rendering.chat import Chat
from tasks.examples.reading import DatasetError, Source
from tasks.storage.durability import durable
from tasks.storage.tables import read, write
from tasks.texts.rules import TextRules, Trained
from tasks.texts.tokenizing import WeightedTokens, tokenize

SCHEMA = pa.schema(
    [
        ("split", pa.string()),
        ("example_id", pa.int32()),
        # Number of the sequence, of an example whose tokens do not grow throughout.
        ("part", pa.int32()),
        ("tokens", pa.list_(pa.int32())),
        # Aligned with the tokens: the weight of each in the loss, 0 where it is not trained.
        ("weights", pa.list_(pa.float32())),
        # Bytes of text in UTF-8 that the trained tokens write.
        ("bytes", pa.int32()),
        ("cut", pa.bool_()),
    ]
)

log = logging.getLogger(__name__)


class TextSource(Protocol):
    """Source of texts: its name in messages, and the sequences of tokens of each text."""

    @property
    def name(self) -> str: ...

    def __len__(self) -> int: ...

    def sequences(self, chat: Chat, trained: Trained) -> Iterator[tuple[int, list[WeightedTokens]]]:
        """Yield the number of each text and its sequences; DatasetError names a broken one."""
        ...


@dataclass(frozen=True)
class WrittenTexts:
    """Texts that are rows of a split."""

    rows: Source

    @property
    def name(self) -> str:
        return f"the split '{self.rows.split}' of {self.rows.dataset}"

    def __len__(self) -> int:
        return len(self.rows.examples())

    def sequences(self, chat: Chat, trained: Trained) -> Iterator[tuple[int, list[WeightedTokens]]]:
        for row in self.rows.examples():
            number = row["example_id"]
            try:
                yield number, tokenize(row["example"], chat, trained)
            except DatasetError as error:
                raise DatasetError(f"row {number} of {self.rows.dataset}: {error}") from error


class Texts:
    """The texts of a run as tokens, read once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def of_split(self, split: str) -> pa.Table:
        """Return the rows of a split in SCHEMA, in the order of its examples."""
        return self._table.filter(pc.field("split") == split)

    @cached_property
    def _table(self) -> pa.Table:
        return read(self.path)


@durable
def bind_texts(path: Path, sources: Mapping[str, TextSource], chat: Chat, rules: TextRules) -> None:
    """Write the tokens of the texts of each split, and log what was cut or left out.

    DatasetError names the row that cannot be tokenized, and a split in which nothing is trained.
    """
    rows: list[dict[str, object]] = []
    for split, source in sources.items():
        counts: Counter[str] = Counter()
        own = [*_rows(source, chat, rules, counts)]
        if not own:
            raise DatasetError(
                f"nothing is trained in {source.name}: {describe_counts(counts)}; see "
                "dataset.trained and dataset.too_long"
            )
        log.info("%s: %s", source.name, describe_counts(counts))
        rows += [{"split": split, **row} for row in own]
    write(pa.Table.from_pylist(rows, schema=SCHEMA), path)


def _rows(
    source: TextSource, chat: Chat, rules: TextRules, counts: Counter[str]
) -> Iterator[dict[str, object]]:
    """Yield the sequences that train something, as rows without their split."""
    most = rules.most_tokens
    for number, sequences in source.sequences(chat, rules.trained):
        counts["texts"] += 1
        for part, whole in enumerate(sequences):
            length = len(whole.tokens)
            if length > most and rules.too_long == "refuse":
                raise DatasetError(
                    f"row {number} of {source.name} has {length} tokens, and dataset.most_tokens "
                    f"is {most}; give more, or dataset.too_long cut or leave_out"
                )
            if length > most and rules.too_long == "leave_out":
                counts["too long and left out"] += 1
                continue
            kept = WeightedTokens(whole.tokens[:most], whole.weights[:most])
            _count(kept, whole, counts)
            if any(kept.weights):
                yield {
                    "example_id": number,
                    "part": part,
                    "tokens": np.array(kept.tokens, np.int32),
                    "weights": np.array(kept.weights, np.float32),
                    "bytes": _count_bytes(kept, chat),
                    "cut": length > most,
                }


def _count(kept: WeightedTokens, whole: WeightedTokens, counts: Counter[str]) -> None:
    """Count what is kept of a sequence, and what is lost."""
    trained = sum(weight > 0 for weight in kept.weights)
    counts["cut"] += len(whole.tokens) > len(kept.tokens)
    counts["cut before their end"] += any(whole.weights[len(kept.tokens) :])
    counts["without a trained token"] += trained == 0
    counts["tokens"] += len(kept.tokens)
    counts["trained tokens"] += trained


def _count_bytes(text: WeightedTokens, chat: Chat) -> int:
    """Count the bytes that the trained tokens write; the token that ends an answer writes none."""
    trained = [
        token
        for token, weight in zip(text.tokens, text.weights, strict=True)
        if weight > 0 and token not in chat.stop_tokens
    ]
    return len(chat.text(trained).encode())


def describe_counts(counts: Counter[str]) -> str:
    """Say the counts that are not 0."""
    return ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
