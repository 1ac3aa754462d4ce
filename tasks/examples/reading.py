"""dataset → examples: the rows of one split, of a file or of a folder of files."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, TypedDict

from ratchet.adapters.errors import counted, did_you_mean, listed
from ratchet.adapters.project.modules import locate
from ratchet.tasks.examples.rows import ROW_READERS, DatasetError, kind_of, name_file, read_rows

README = Path("datasets/README.md")
PART_SUFFIX = r"(-(?P<number>\d+)(-of-(?P<count>\d+))?)?"
"""Pattern of what may follow the split in a file's name, as datasets/README.md says."""
SPLIT = "split"
"""Column with the name of the split that a row belongs to."""
MOST_NAMED, LONGEST_NAME_TOLD = 6, 40
"""Names that a refusal lists, and the letters of each."""


Order = Literal["shuffled", "sequential"]
"""Order of a pass: shuffled anew for each, or as in the file. A pass draws every example once."""


class Example(TypedDict):
    """Row of a dataset: its number, from 0, in the file or the split's files, and its columns."""

    example_id: int
    example: dict[str, Any]


@dataclass(frozen=True)
class Division:
    """Division of a set without splits, or with the first one alone, by a hash of each row.

    The `share` of its distinct rows is held out, so that equal rows are on one side. Unless it is
    `given` by the recipe, only a file whose rows have no column `split` is divided.
    """

    splits: tuple[str, str]
    share: float
    seed: int
    given: bool


@dataclass(frozen=True)
class Source:
    """Source of examples: a dataset's split, the columns its agent reads, and their order.

    `renamed` lists columns of an example with the names that they have in the file. A set that has
    no splits is divided by its `division`; the examples are then the `held_out` ones, or the
    others.
    """

    dataset: Path
    split: str
    columns: tuple[str, ...]
    order: Order = "shuffled"
    renamed: tuple[tuple[str, str], ...] = ()
    division: Division | None = None
    held_out: bool = False

    def examples(self) -> list[Example]:
        """Read the examples (`read_examples`)."""
        rows = self._divided()
        if rows is None:
            rows = read_examples(self.dataset, self.split, self.columns)
        if not self.renamed:
            return rows
        theirs = {name for _, name in self.renamed}
        named: list[Example] = []
        for row in rows:
            example = row["example"]
            kept = {name: value for name, value in example.items() if name not in theirs}
            ours = {our: example[their] for our, their in self.renamed}
            named.append({**row, "example": kept | ours})
        return named

    def describe_division(self) -> str:
        """Say how many rows are held out by a share; empty if no row is."""
        if self.division is None or self.division.share == 0:
            return ""
        if (files := _files_to_divide(self.dataset, self.division)) is None:
            return ""
        rows, held_out = _divide(files, self.division)
        return (
            f"{len(held_out)} of the {counted(len(rows), 'row')} of {self.dataset.name} are held "
            f"out, by a share of {self.division.share:g} and a hash of each"
        )

    def _divided(self) -> list[Example] | None:
        """Return the rows of this side of a set that is divided; None of any other set."""
        if (
            self.division is None
            or (files := _files_to_divide(self.dataset, self.division)) is None
        ):
            return None
        rows, held_out = _divide(files, self.division)
        if not rows or (self.division.share and not held_out):
            raise DatasetError(
                f"{name_file(self.dataset)} has too few rows to hold one out ({len(rows)}, equal "
                "ones counted once); give more, or dataset.held_out 0"
            )
        if self.held_out and not held_out:
            raise DatasetError(
                f"nothing of {name_file(self.dataset)} is held out, by dataset.held_out 0; give a "
                "share"
            )
        own = [one for one in rows.items() if (one[0] in held_out) == self.held_out]
        return _examples(self.dataset, own, self.columns)


def read_examples(dataset: Path, split: str, columns: Sequence[str] = ()) -> list[Example]:
    """Read the rows of one split, in the order of the files; each has every one of `columns`.

    In a file, the column `split` says which rows these are; in a folder, the names of its files do.
    A missing or unreadable file, a missing column or an empty split raises a DatasetError that
    names what was found instead.
    """
    if _is_folder(dataset):
        rows = [row for file in _files_of_split(dataset, split) for row in _read_file(file)]
        numbered, found = [*enumerate(rows)], ""
    else:
        rows = _read_file(dataset)
        for number, row in enumerate(rows):
            _require(dataset, number, row, [SPLIT])
            if row[SPLIT] is None:
                raise DatasetError(
                    f"row {number} of {name_file(dataset)} has null as its {SPLIT}; give each row "
                    "a split, or leave the row out"
                )
        numbered = [(number, row) for number, row in enumerate(rows) if str(row[SPLIT]) == split]
        found = _listed(sorted({str(row[SPLIT]) for row in rows}))
    if not numbered:
        raise DatasetError(
            f"{name_file(dataset)} has no rows whose split is '{split}' "
            f"(found: {found or 'no rows at all'}); give dataset.splits, or see {locate(README)}"
        )
    return _examples(dataset, numbered, columns)


def _examples(
    dataset: Path, numbered: Sequence[tuple[int, dict[str, Any]]], columns: Sequence[str]
) -> list[Example]:
    for number, row in numbered:
        _require(dataset, number, row, columns)
    return [{"example_id": number, "example": row} for number, row in numbered]


def _is_folder(dataset: Path) -> bool:
    try:
        return dataset.is_dir()
    except OSError:  # a name that no file can have
        return False


_Files = tuple[tuple[Path, int, int], ...]
"""Files, each with the time of its last change and its size."""


def _files_to_divide(dataset: Path, division: Division) -> _Files | None:
    """List the files whose rows are divided, if they are; DatasetError if one split is there."""
    train, test = division.splits
    if not _is_folder(dataset):
        rows = _read_file(dataset)
        splits = {str(row[SPLIT]) for row in rows if row.get(SPLIT) is not None}
        if splits and division.given and test in splits:
            _refuse_share(dataset, test)
        divided = division.given or (rows != [] and not splits)
        return (_state(dataset),) if divided else None
    if not division.given:
        return None
    if any(_name_of_part(test).fullmatch(stem) for stem, _ in _stems(dataset)):
        _refuse_share(dataset, test)
    return tuple(map(_state, _files_of_split(dataset, train)))


def _refuse_share(dataset: Path, split: str) -> None:
    raise DatasetError(
        f"{name_file(dataset)} has the split '{split}' to hold out, so that dataset.held_out would "
        "be a second one; leave that out"
    )


@lru_cache(maxsize=16)
def _divide(files: _Files, division: Division) -> tuple[dict[int, dict[str, Any]], frozenset[int]]:
    """Return the rows that are divided, by number, and the numbers of the held-out rows."""
    train, _ = division.splits
    read = (row for file in files for row in _read_rows(*file))
    rows = {
        number: row
        for number, row in enumerate(read)
        if row.get(SPLIT) is None or str(row[SPLIT]) == train
    }
    hashes = {
        number: sha256(f"{division.seed}/{json.dumps(row, sort_keys=True)}".encode()).digest()
        for number, row in rows.items()
    }
    distinct = sorted({*hashes.values()})
    wanted = max(1, round(division.share * len(distinct))) if division.share else 0
    chosen = {*distinct[: max(0, min(wanted, len(distinct) - 1))]}
    return rows, frozenset(number for number, one in hashes.items() if one in chosen)


def _stems(folder: Path) -> list[tuple[str, Path]]:
    """List the files of a folder that can be read, in order, each with its name before the kind."""
    files = sorted(file for file in folder.iterdir() if kind_of(file) in ROW_READERS)
    return [(file.name.removesuffix(kind_of(file)), file) for file in files]


def _name_of_part(split: str) -> re.Pattern[str]:
    return re.compile(re.escape(split) + PART_SUFFIX)


def _files_of_split(folder: Path, split: str) -> list[Path]:
    """List the files of a split: the file named after it, or its numbered parts in order."""
    stems, name_of_part = _stems(folder), _name_of_part(split)
    parts = [(part, file) for stem, file in stems if (part := name_of_part.fullmatch(stem))]
    names, named = _listed(file.name for _, file in stems), name_file(folder)
    if not parts:
        raise DatasetError(
            f"{named} has no file of the split '{split}', such as {split}.jsonl or "
            f"{split}-00000-of-00001.parquet (found: {names or 'no data files'}); give "
            f"dataset.splits or dataset.held_out, or see {locate(README)}"
        )
    kinds = {(kind_of(file), part["count"], bool(part["number"])) for part, file in parts}
    if len(kinds) > 1 or len({int(part["number"] or 0) for part, _ in parts}) < len(parts):
        raise DatasetError(
            f"{named} has the split '{split}' more than once (found: {names}); leave one file of "
            "it, or the numbered parts of one"
        )
    count = int(parts[0][0]["count"] or len(parts))
    if len(parts) != count:
        raise DatasetError(
            f"{named} has {len(parts)} of the {count} parts of the split '{split}' (found: "
            f"{names}); add the others"
        )
    return [file for _, file in sorted(parts, key=lambda found: int(found[0]["number"] or 0))]


def _listed(names: Iterable[str]) -> str:
    """List the beginnings of the first names, and the number of the others."""
    return listed((name[:LONGEST_NAME_TOLD] for name in names), MOST_NAMED)


def _read_file(file: Path) -> list[dict[str, Any]]:
    """Read the rows of a file, once unless it changes, since each step of a run asks for them."""
    return _read_rows(*_state(file))


def _state(file: Path) -> tuple[Path, int, int]:
    """Return a file that is there with the time of its last change and its size."""
    if kind_of(file) not in ROW_READERS:
        raise DatasetError(
            f"{name_file(file)} is not a dataset we read: give a {', '.join(ROW_READERS)} file, "
            f"or a folder of them; see {locate(README)}"
        )
    try:
        state = file.stat()
    except (OSError, ValueError) as error:
        raise DatasetError(f"{name_file(file)} {_why_absent(file, error)}") from error
    return file, state.st_mtime_ns, state.st_size


def _why_absent(file: Path, error: OSError | ValueError) -> str:
    if not isinstance(error, FileNotFoundError):
        reason = error.strerror if isinstance(error, OSError) else error
        return f"cannot be opened ({reason}); give another path"
    if file.is_symlink():
        return f"is a link to {name_file(file.readlink())}, which is not there; mend the link"
    near = did_you_mean(str(file), map(str, file.parent.glob("*")))
    return f"does not exist{near or ';'} see {locate(README)}"


@lru_cache(maxsize=256)
def _read_rows(file: Path, _mtime: int, _size: int) -> list[dict[str, Any]]:
    return read_rows(file)


def _require(dataset: Path, number: int, row: Mapping[str, Any], columns: Sequence[str]) -> None:
    for column in columns:
        if column not in row:
            raise DatasetError(
                f"row {number} of {name_file(dataset)} has no column "
                f"'{column[:LONGEST_NAME_TOLD]}' (found: {_listed(row)}); see {locate(README)}"
            )


def is_padded(dataset: Path) -> bool:
    """Tell whether a file, or a file of a folder, is of Parquet, whose objects have equal keys."""
    files = dataset.iterdir() if dataset.is_dir() else [dataset]
    return any(file.suffix == ".parquet" for file in files)
