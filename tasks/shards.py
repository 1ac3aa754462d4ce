"""dataset → shards: the examples of each step, seeded, and a pure function of the step."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, TypedDict

import duckdb

from adapters.errors import UserError
from tasks.storage.files import write_text
from tasks.storage.tables import select

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
    """A dataset cannot be read as the recipe asks."""


class Example(TypedDict):
    """A row of a dataset: its number in the file, from 0, and its columns by name."""

    example_id: int
    example: dict[str, Any]


def read_examples(dataset: Path, split: str, columns: Sequence[str] = ()) -> list[Example]:
    """The rows of one split, in the file's order; each has every one of `columns`.

    A missing file, one we cannot read, a missing column or an empty split is a DatasetError that
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
    """Where examples come from: a dataset's split, and the columns its agent reads."""

    dataset: Path
    split: str
    columns: tuple[str, ...]

    def examples(self) -> list[Example]:
        """See `read_examples`."""
        return read_examples(self.dataset, self.split, self.columns)


def choose(examples: Sequence[Example], seed: int, step: int, size: int) -> list[Example]:
    """The `size` examples of step `step`, read off an endless series of shuffled passes.

    Nothing is dropped at the end of a pass: the next one begins within the same shard, so a shard
    may hold an example twice. No state is kept: any step can be asked for at any time.
    """
    if size < 1 or step < 0:
        raise ValueError(f"a shard needs size >= 1 and step >= 0, got size {size}, step {step}")
    count = len(examples)
    places = (divmod(place, count) for place in range(step * size, (step + 1) * size))
    return [examples[pass_order(count, seed, turn)[position]] for turn, position in places]


@lru_cache(maxsize=4)
def pass_order(count: int, seed: int, turn: int) -> tuple[int, ...]:
    """The shuffled order of pass `turn` over `count` examples: a keyed hash, the same for ever."""
    return tuple(sorted(range(count), key=lambda place: sha256(_key(seed, turn, place)).digest()))


def write_shard(examples: Sequence[Example], path: Path) -> Path:
    """`path`, one example a line."""
    lines = [json.dumps(example, ensure_ascii=False) + "\n" for example in examples]
    return write_text(path, "".join(lines))


def read_shard(path: Path) -> list[Example]:
    """What `write_shard` wrote, in its order: an example's position names its group."""
    # Not splitlines(): a text may hold a line separator that JSON leaves as it is.
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


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


def _key(seed: int, turn: int, place: int) -> bytes:
    return f"{seed}/{turn}/{place}".encode()
