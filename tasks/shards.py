"""dataset → shards: the examples of each step, by a seeded curriculum."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, TypedDict, cast

import duckdb

from adapters.errors import UserError
from tasks.curricula import Curriculum
from tasks.storage.durability import durable
from tasks.storage.json_files import read_rows, write_rows
from tasks.storage.tables import select

SHUFFLED = Curriculum()

# CSV knows no types, so its values stay the strings they are ("007" is not 7) and an empty cell is
# None; JSON lines are parsed by Python's json, so that nothing is guessed to be a date.
READERS = {
    ".csv": """
        select to_json(dataset_row) as example
        from read_csv(
            $dataset, all_varchar = true, header = true, delim = ',', quote = '"', escape = '"'
        ) as dataset_row
    """,
    ".jsonl": "select json as example from read_ndjson_objects($dataset)",
    ".parquet": "select to_json(dataset_row) as example from read_parquet($dataset) as dataset_row",
}


class DatasetError(UserError):
    """Refusal of a dataset that cannot be read as the recipe asks."""


class Example(TypedDict):
    """Row of a dataset: its number in the file, from 0, and its columns by name."""

    example_id: int
    example: dict[str, Any]


class ShardRow(Example):
    """Example of a shard, and the number of the rollout batch that plays it."""

    batch: int


def read_examples(dataset: Path, split: str, columns: Sequence[str] = ()) -> list[Example]:
    """Read the rows of one split, in the file's order; each has every one of `columns`.

    A missing or unreadable file, a missing column or an empty split raises a DatasetError that
    names what was found instead.
    """
    rows = _read_rows(dataset)
    chosen: list[Example] = []
    for number, row in enumerate(rows):
        _require(dataset, row, ["split"])
        if row["split"] == split:
            _require(dataset, row, columns)
            chosen.append({"example_id": number, "example": row})
    if not chosen:
        found = sorted({str(row["split"]) for row in rows})
        raise DatasetError(
            f"{dataset} has no rows whose split is '{split}' "
            f"(found: {', '.join(found) or 'no rows at all'}); see datasets/README.md"
        )
    return chosen


@dataclass(frozen=True)
class Source:
    """Source of examples: a dataset's split, the columns its agent reads, and their order."""

    dataset: Path
    split: str
    columns: tuple[str, ...]
    curriculum: Curriculum = SHUFFLED

    def examples(self) -> list[Example]:
        """Read the examples (`read_examples`); each has the difficulty that orders them, if any."""
        difficulty = self.curriculum.difficulty
        if difficulty is None:
            return read_examples(self.dataset, self.split, self.columns)
        examples = read_examples(self.dataset, self.split, (*self.columns, difficulty))
        for row in examples:
            _check_number(self.dataset, row, difficulty)
        return examples


def write_shard(
    path: Path, source: Source, seed: int, step: int, size: int, batches: int = 1
) -> None:
    """Write the examples of a step, one a line, split into `batches` rollout batches.

    The file says which batch plays an example, so a run may go on with another number of batches:
    a shard that was drawn keeps its own.
    """
    examples = choose(source.examples(), seed, step, size, source.curriculum)
    rows = [
        {**example, "batch": place * min(batches, size) // size}
        for place, example in enumerate(examples)
    ]
    write_rows(path, rows)


draw_shard = durable("draw_shard", write_shard)
"""dataset → shard."""


def read_shard(path: Path) -> list[ShardRow]:
    """Read a shard, in its order: an example's place names its group."""
    return cast(list[ShardRow], read_rows(path))


def choose(
    examples: Sequence[Example],
    seed: int,
    step: int,
    size: int,
    curriculum: Curriculum = SHUFFLED,
) -> list[Example]:
    """Choose the `size` examples of step `step`.

    With `pass_rate` these are the first of a ranking, from its begin again if it is too short.
    Any other order is an endless series of passes, in which the end of a pass drops nothing: the
    next pass begins within the same shard, so a shard may hold an example twice. No state is kept:
    any step can be asked for at any time.
    """
    if size < 1 or step < 0:
        raise ValueError(f"a shard needs size >= 1 and step >= 0, got size {size}, step {step}")
    count = len(examples)
    if curriculum.order == "pass_rate":
        by_id = {row["example_id"]: row for row in examples}
        ranked = curriculum.rank([*by_id], seed)
        return [by_id[ranked[place % count]] for place in range(size)]
    places = [divmod(place, count) for place in range(step * size, (step + 1) * size)]
    column = curriculum.difficulty
    difficulties = [0.0 if column is None else float(row["example"][column]) for row in examples]
    turns = {turn for turn, _ in places}
    passes = {turn: curriculum.order_pass(difficulties, seed, turn) for turn in turns}
    return [examples[passes[turn][position]] for turn, position in places]


def _read_rows(dataset: Path) -> list[dict[str, Any]]:
    if dataset.suffix not in READERS:
        raise DatasetError(
            f"{dataset} is not a dataset we read: give a {', '.join(READERS)} file; "
            "see datasets/README.md"
        )
    if not dataset.is_file():
        raise DatasetError(f"{dataset} does not exist; see datasets/README.md")
    try:
        table = select(READERS[dataset.suffix], dataset=dataset)
    except duckdb.Error as error:
        raise DatasetError(f"{dataset} cannot be read: {error}") from error
    return [json.loads(text) for text in table.column("example").to_pylist()]


def _require(dataset: Path, row: object, columns: Sequence[str]) -> None:
    if not isinstance(row, dict):
        raise DatasetError(f"{dataset} has a row that is no JSON object: {json.dumps(row)[:80]}")
    for column in columns:
        if column not in row:
            raise DatasetError(
                f"{dataset} has no column '{column}' (found: {', '.join(row)}); "
                "see datasets/README.md"
            )


def _check_number(dataset: Path, row: Example, column: str) -> None:
    try:
        known = isfinite(float(row["example"][column]))
    except (TypeError, ValueError):
        known = False
    if not known:
        raise DatasetError(
            f"{dataset} has no number as the {column} of row {row['example_id']}, but "
            f"{row['example'][column]!r}; dataset.difficulty names a column of numbers"
        )
