"""texts → their tokens: one file, written once, of which every step of a run is made."""

import json
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from adapters.rendering.chat import Chat
from tasks.examples.reading import DatasetError, Source
from tasks.examples.teaching import fill_reads
from tasks.storage.durability import durable
from tasks.storage.tables import read, write
from tasks.texts.conversations import read_unpadded
from tasks.texts.rules import TRAIN, TextRules, Trained
from tasks.texts.tokenizing import WeightedTokens, tokenize

SCHEMA = pa.schema(
    [
        ("split", pa.string()),
        # Name of the source, if the texts are of several.
        ("source", pa.string()),
        ("example_id", pa.int32()),
        # Number of the sequence, of an example whose tokens do not grow throughout.
        ("part", pa.int32()),
        ("tokens", pa.list_(pa.int32())),
        # Aligned with the tokens: the weight of each in the loss, 0 where it is not trained.
        ("weights", pa.list_(pa.float32())),
        # Bytes of text in UTF-8 that the trained tokens write.
        ("bytes", pa.int32()),
        ("cut", pa.bool_()),
        # Whether the last trained token is one at which an answer stops.
        ("ends", pa.bool_()),
    ]
)
KEYS = ["split", "source", "example_id", "part"]
"""Columns that name a sequence."""

TAUGHT = pa.schema(
    [
        *(SCHEMA.field(name) for name in KEYS),
        # How many tokens the teacher has read.
        ("read", pa.int32()),
        # The teacher's likeliest tokens at each trained place, equally many of each in turn.
        ("top_tokens", pa.list_(pa.int32())),
        ("top_logprobs", pa.list_(pa.float32())),
    ]
)
"""What a teacher finds likeliest in texts, a row for each of their sequences."""

PART = 256
"""Sequences that a file of TAUGHT has."""

COUNTS = b"counts"
"""Key of the file's metadata: what there is of the texts of each source, and what is lost."""

"""Split that is trained; what is of another is held out."""

TextCounts = Mapping[str, Mapping[str, int]]

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
class RowTexts(ABC):
    """Texts that are made of the rows of a split."""

    rows: Source

    @property
    def name(self) -> str:
        return f"the split '{self.rows.split}' of {self.rows.dataset}"

    def __len__(self) -> int:
        return len(self.rows.examples())

    def sequences(self, chat: Chat, trained: Trained) -> Iterator[tuple[int, list[WeightedTokens]]]:
        for row in read_unpadded(self.rows):
            number = row["example_id"]
            try:
                yield number, self.tokenize(row["example"], chat, trained)
            except DatasetError as error:
                raise DatasetError(f"row {number} of {self.rows.dataset}: {error}") from error

    @abstractmethod
    def tokenize(
        self, row: Mapping[str, Any], chat: Chat, trained: Trained
    ) -> list[WeightedTokens]:
        """Return the sequences of a row; DatasetError says what is wrong with it."""


@dataclass(frozen=True)
class WrittenTexts(RowTexts):
    """Texts that stand in rows, behind a text that is read before each conversation."""

    reads: str | None = None

    def tokenize(
        self, row: Mapping[str, Any], chat: Chat, trained: Trained
    ) -> list[WeightedTokens]:
        before = None if self.reads is None else fill_reads(self.reads, row)
        return tokenize(row, chat, trained, before)


class Texts:
    """The texts of a run as tokens, with what its teacher finds likeliest, read once.

    A teacher's files are named by `taught`, by the number of their part.
    """

    def __init__(self, path: Path, taught: Callable[[int], Path] | None = None) -> None:
        self.path = path
        self._taught = taught

    def parts(self) -> list[Path]:
        """List the teacher's files that the texts need."""
        assert self._taught is not None, "the texts have a teacher"
        return [*map(self._taught, range(ceil(self._table.num_rows / PART)))]

    def of_part(self, part: int) -> pa.Table:
        """Return the rows of a part in SCHEMA."""
        return self._table.slice(part * PART, PART)

    def of_split(self, split: str) -> pa.Table:
        """Return the rows of a split in SCHEMA, in the order of its examples.

        They have the teacher's columns as well, if there is one.
        """
        table = self._with_teacher if self._taught else self._table
        return table.filter(pc.field("split") == split)

    def counts(self) -> TextCounts:
        """Return for each source what was counted when its texts became tokens."""
        return json.loads(read(self.path, []).schema.metadata[COUNTS])

    @cached_property
    def _table(self) -> pa.Table:
        return read(self.path)

    @cached_property
    def _with_teacher(self) -> pa.Table:
        table, taught = self._table, pa.concat_tables(map(read, self.parts()))
        if table.select(KEYS).to_pylist() != taught.select(KEYS).to_pylist():
            raise ValueError(
                f"the teacher's files of {self.path} are those of other texts; remove them, and "
                "they are made again"
            )
        for name in TAUGHT.names[len(KEYS) :]:
            table = table.append_column(name, taught[name])
        return table


@durable
def bind_texts(path: Path, sources: Mapping[str, TextSource], chat: Chat, rules: TextRules) -> None:
    """Write the tokens of the texts of each split, and count what was cut or left out.

    A source is named by its split or, if there are several, by SPLIT/NAME; those that are trained
    come first. DatasetError names the row that cannot be tokenized, and a source in which nothing
    is trained.
    """
    rows: list[dict[str, Any]] = []
    counts = {name: Counter[str]() for name in sources}
    trained: set[bytes] = set()
    for name, source in sources.items():
        (split, _, part), counted = name.partition("/"), counts[name]
        own = [*trained_rows(source, chat, rules, counted)]
        if not own:
            raise DatasetError(
                f"nothing is trained in {source.name}: {describe_counts(counted)}; see "
                "dataset.trained and dataset.too_long"
            )
        if split == TRAIN:
            trained |= {row["tokens"].tobytes() for row in own}
        else:
            repeated = sum(row["tokens"].tobytes() in trained for row in own)
            counted["sequences that are trained as well"] = repeated
            _warn_of_repeated(source, repeated, len(own))
        log.info("%s: %s", source.name, describe_counts(counted))
        rows += [{"split": split, "source": part, **row} for row in own]
    schema = SCHEMA.with_metadata({COUNTS: json.dumps(counts)})
    write(pa.Table.from_pylist(rows, schema=schema), path)


def describe_counts(counts: Mapping[str, int]) -> str:
    """Say the counts that are not 0."""
    return ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)


def _warn_of_repeated(source: TextSource, repeated: int, sequences: int) -> None:
    if repeated:
        log.warning(
            "%s: %d of %d held-out sequences are trained as well, token for token, so that their "
            "loss says nothing of new texts",
            source.name,
            repeated,
            sequences,
        )


def trained_rows(
    source: TextSource, chat: Chat, rules: TextRules, counts: Counter[str]
) -> Iterator[dict[str, Any]]:
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
            trained = kept.trained()
            ends = {*trained[-1:]} & {*chat.stop_tokens} != set()
            counts["tokens"] += len(kept.tokens)
            counts["trained tokens"] += len(trained)
            counts["sequences that end as answers do"] += ends
            counts["cut"] += length > most
            if whole.thoughts_left_out:
                counts["earlier answers without their reasoning"] += whole.thoughts_left_out
            if whole.unanswered:
                counts["messages behind the last answer left out"] += whole.unanswered
            counts["cut before their end"] += any(whole.weights[most:])
            counts["without a trained token"] += trained == []
            if trained:
                counts["sequences"] += 1
                yield {
                    "example_id": number,
                    "part": part,
                    "tokens": np.array(kept.tokens, np.int32),
                    "weights": np.array(kept.weights, np.float32),
                    "bytes": _count_bytes(trained, chat),
                    "cut": length > most,
                    "ends": ends,
                }


def _count_bytes(trained: Sequence[int], chat: Chat) -> int:
    """Count the bytes that trained tokens write; the token that ends an answer writes none."""
    written = [token for token in trained if token not in chat.stop_tokens]
    return len(chat.text(written).encode())
