"""dataset → examples: the rows of one split, of a file or of a folder of files."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import Any, TypedDict

import duckdb

from adapters.errors import UserError, did_you_mean
from adapters.project.files import locate
from tasks.examples.curricula import Curriculum
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
    ".jsonl.gz": "select json as example from read_ndjson_objects($dataset)",
    ".parquet": "select to_json(dataset_row) as example from read_parquet($dataset) as dataset_row",
}

README = Path("datasets/README.md")
PART = r"(-(?P<number>\d+)(-of-(?P<count>\d+))?)?"
"""What may follow the split in the name of a file; README.md of datasets/ tells the rule."""


class DatasetError(UserError):
    """Refusal of a dataset that cannot be read as the recipe asks."""


class Example(TypedDict):
    """Row of a dataset: its number, from 0, in the file or the split's files, and its columns."""

    example_id: int
    example: dict[str, Any]


SHUFFLED = Curriculum()


@dataclass(frozen=True)
class Source:
    """Source of examples: a dataset's split, the columns its agent reads, and their order.

    `renamed` lists columns of an example with the names that they have in the file.
    """

    dataset: Path
    split: str
    columns: tuple[str, ...]
    curriculum: Curriculum = SHUFFLED
    renamed: tuple[tuple[str, str], ...] = ()

    def examples(self) -> list[Example]:
        """Read the examples (`read_examples`); each has the difficulty that orders them, if any."""
        difficulty = self.curriculum.difficulty
        if difficulty is None:
            rows = read_examples(self.dataset, self.split, self.columns)
            return [_renamed(row, self.renamed) for row in rows] if self.renamed else rows
        examples = read_examples(self.dataset, self.split, (*self.columns, difficulty))
        for row in examples:
            _check_number(self.dataset, row, difficulty)
        return examples


def _renamed(row: Example, names: Sequence[tuple[str, str]]) -> Example:
    example, theirs = row["example"], {theirs for _, theirs in names}
    kept = {name: value for name, value in example.items() if name not in theirs}
    return {**row, "example": kept | {ours: example[theirs] for ours, theirs in names}}


def read_examples(dataset: Path, split: str, columns: Sequence[str] = ()) -> list[Example]:
    """Read the rows of one split, in the order of the files; each has every one of `columns`.

    In a file, the column `split` says which rows these are; in a folder, the names of its files do.
    A missing or unreadable file, a missing column or an empty split raises a DatasetError that
    names what was found instead.
    """
    if dataset.is_dir():
        rows = [row for file in _files_of_split(dataset, split) for row in _read_file(file)]
        numbered, found = [*enumerate(rows)], ""
    else:
        rows = _read_file(dataset)
        for row in rows:
            _require(dataset, row, ["split"])
        numbered = [(number, row) for number, row in enumerate(rows) if row["split"] == split]
        found = ", ".join(sorted({str(row["split"]) for row in rows}))
    if not numbered:
        raise DatasetError(
            f"{dataset} has no rows whose split is '{split}' "
            f"(found: {found or 'no rows at all'}); see {locate(README)}"
        )
    for _, row in numbered:
        _require(dataset, row, columns)
    return [{"example_id": number, "example": row} for number, row in numbered]


def _files_of_split(folder: Path, split: str) -> list[Path]:
    """List the files of a split: the one that is named after it, or its numbered parts in order."""
    datasets = sorted(file for file in folder.iterdir() if _kind(file) in READERS)
    name_of_part = re.compile(re.escape(split) + PART)
    stems = [(file.name.removesuffix(_kind(file)), file) for file in datasets]
    parts = [(part, file) for stem, file in stems if (part := name_of_part.fullmatch(stem))]
    names = ", ".join(file.name for file in datasets)
    if not parts:
        raise DatasetError(
            f"{folder} has no file of the split '{split}', such as {split}.jsonl or "
            f"{split}-00000-of-00001.parquet (found: {names or 'no data files'}); see "
            f"{locate(README)}"
        )
    kinds = {(_kind(file), part["count"], bool(part["number"])) for part, file in parts}
    if len(kinds) > 1 or len({int(part["number"] or 0) for part, _ in parts}) < len(parts):
        raise DatasetError(
            f"{folder} has the split '{split}' more than once (found: {names}); leave one file of "
            "it, or the numbered parts of one"
        )
    count = int(parts[0][0]["count"] or len(parts))
    if len(parts) != count:
        raise DatasetError(
            f"{folder} has {len(parts)} of the {count} parts of the split '{split}' (found: "
            f"{names}); add the others"
        )
    return [file for _, file in sorted(parts, key=lambda found: int(found[0]["number"] or 0))]


def _kind(file: Path) -> str:
    """Return the ending of a file's name that says how it is read."""
    return "".join(file.suffixes[-2:]) if file.suffix == ".gz" else file.suffix


def _read_file(file: Path) -> list[dict[str, Any]]:
    """Read the rows of a file, once unless it changes, since each step of a run asks for them."""
    if _kind(file) not in READERS:
        raise DatasetError(
            f"{file} is not a dataset we read: give a {', '.join(READERS)} file, or a folder of "
            f"them; see {locate(README)}"
        )
    if not file.is_file():
        near = did_you_mean(str(file), map(str, file.parent.glob("*")))
        raise DatasetError(f"{file} does not exist{near or ';'} see {locate(README)}")
    state = file.stat()
    return _read_rows(file, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=256)
def _read_rows(file: Path, _mtime: int, _size: int) -> list[dict[str, Any]]:
    try:
        table = select(READERS[_kind(file)], dataset=file)
    except duckdb.Error as error:
        raise DatasetError(f"{file} cannot be read; mend the file: {error}") from error
    return [json.loads(text) for text in table.column("example").to_pylist()]


def _require(dataset: Path, row: object, columns: Sequence[str]) -> None:
    if not isinstance(row, dict):
        raise DatasetError(f"{dataset} has a row that is no JSON object: {json.dumps(row)[:80]}")
    for column in columns:
        if column not in row:
            raise DatasetError(
                f"{dataset} has no column '{column}' (found: {', '.join(row)}); "
                f"see {locate(README)}"
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


def is_padded(dataset: Path) -> bool:
    """Tell whether a file, or a file of a folder, is of Parquet, whose objects have equal keys."""
    files = dataset.iterdir() if dataset.is_dir() else [dataset]
    return any(file.suffix == ".parquet" for file in files)
