"""dataset → examples: the rows of one split, of a file or of a folder, and what a teacher reads."""

import gzip
import io
import json
import logging
import re
import zlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from string import Template
from typing import IO, Any, Literal, TypedDict, cast

from ratchet.adapters.errors import counted, did_you_mean, listed
from ratchet.adapters.project.modules import locate
from ratchet.tasks.examples.rows import (
    BadFile,
    BadRow,
    DatasetError,
    check_memory,
    check_row,
    read_csv,
    read_json,
    read_json_lines,
)

README = Path("datasets/README.md")
PART_SUFFIX = r"(-(?P<number>\d+)(-of-(?P<count>\d+))?)?"
"""Pattern of what may follow the split in a file's name, as datasets/README.md says."""
SPLIT = "split"
"""Column with the name of the split that a row belongs to."""
MOST_NAMED = 6
"""Names that a refusal lists."""

log = logging.getLogger(__name__)

Order = Literal["shuffled", "sequential"]
"""Order of a pass: shuffled anew for each, or as in the file. A pass draws every example once."""


class Example(TypedDict):
    """Row of a dataset: its number, from 0, in the file or the split's files, and its columns."""

    example_id: int
    example: dict[str, Any]


@dataclass(frozen=True)
class Division:
    """Division of a set without splits, or with one `split` alone, by a hash of each row.

    The `share` of its distinct rows is held out, so that equal rows are on one side. Unless it is
    `given` by the recipe, only a file whose rows have no column `split` is divided.
    """

    split: str
    share: float
    seed: int
    given: bool


@dataclass(frozen=True)
class Source:
    """Source of examples: a dataset's split, the columns its agent reads, and their order.

    `renamed` lists columns of an example with the names that they have in the file. A set that has
    no splits is divided by its `division`; then these are the `held_out` ones, or the others.
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
        named: list[Example] = []
        for row in rows:
            example = copy(row["example"])
            ours = {our: example[their] for our, their in self.renamed}
            for their in {name for _, name in self.renamed}:
                del example[their]
            example.update(ours)
            named.append({**row, "example": example})
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
                f"{self.dataset} has too few rows to hold one out ({len(rows)}, equal "
                "ones counted once); give more, or dataset.held_out 0"
            )
        if self.held_out and not held_out:
            raise DatasetError(
                f"nothing of {self.dataset} is held out, by dataset.held_out 0; give a share"
            )
        own = [one for one in rows.items() if (one[0] in held_out) == self.held_out]
        return _examples(self.dataset, own, self.columns)


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
        for number, row in enumerate(rows):
            _require(dataset, number, row, [SPLIT])
            if row[SPLIT] is None:
                raise DatasetError(
                    f"row {number} of {dataset} has null as its {SPLIT}; give each row "
                    "a split, or leave the row out"
                )
        numbered = [(number, row) for number, row in enumerate(rows) if str(row[SPLIT]) == split]
        found = listed(sorted({str(row[SPLIT]) for row in rows}), MOST_NAMED)
    if not numbered:
        raise DatasetError(
            f"{dataset} has no rows whose split is '{split}' "
            f"(found: {found or 'no rows at all'}); give dataset.splits, or see {locate(README)}"
        )
    return _examples(dataset, numbered, columns)


def _examples(
    dataset: Path, numbered: Sequence[tuple[int, dict[str, Any]]], columns: Sequence[str]
) -> list[Example]:
    for number, row in numbered:
        _require(dataset, number, row, columns)
    return [{"example_id": number, "example": row} for number, row in numbered]


_Files = tuple[tuple[Path, int, int], ...]
"""Files, each with the time of its last change and its size."""


def _files_to_divide(dataset: Path, division: Division) -> _Files | None:
    if not dataset.is_dir():
        rows = _read_file(dataset)
        splits = any(row.get(SPLIT) is not None for row in rows)
        divided = division.given or (rows != [] and not splits)
        return (_state(dataset),) if divided else None
    if not division.given:
        return None
    return tuple(map(_state, _files_of_split(dataset, division.split)))


@lru_cache(maxsize=16)
def _divide(files: _Files, division: Division) -> tuple[dict[int, dict[str, Any]], frozenset[int]]:
    """Return the rows that are divided, by number, and the numbers of the held-out rows."""
    read = (row for file in files for row in _read_rows(*file))
    rows = {
        number: row
        for number, row in enumerate(read)
        if row.get(SPLIT) is None or str(row[SPLIT]) == division.split
    }
    hashes = {
        number: sha256(f"{division.seed}/{json.dumps(row, sort_keys=True)}".encode()).digest()
        for number, row in rows.items()
    }
    distinct = sorted({*hashes.values()})
    wanted = max(1, round(division.share * len(distinct))) if division.share else 0
    chosen = {*distinct[: max(0, min(wanted, len(distinct) - 1))]}
    return rows, frozenset(number for number, one in hashes.items() if one in chosen)


def data_files(dataset: Path) -> list[Path]:
    """List the files of a data set that are read: itself, or those of a folder."""
    if not dataset.is_dir():
        return [dataset]
    return sorted(file for file in dataset.iterdir() if kind_of(file) in ROW_READERS)


def _files_of_split(folder: Path, split: str) -> list[Path]:
    """List the files of a split: the file named after it, or its numbered parts in order."""
    name_of_part = re.compile(re.escape(split) + PART_SUFFIX)
    files = data_files(folder)
    named = [
        (name_of_part.fullmatch(file.name.removesuffix(kind_of(file))), file) for file in files
    ]
    parts = [(int(part["number"] or 0), part, file) for part, file in named if part]
    found = listed((file.name for file in files), MOST_NAMED) or "no data files"
    if not parts:
        raise DatasetError(
            f"{folder} has no file of the split '{split}', such as {split}.jsonl or "
            f"{split}-00000-of-00001.parquet (found: {found}); give dataset.splits or "
            f"dataset.held_out, or see {locate(README)}"
        )
    kinds = {(kind_of(file), part["count"], bool(part["number"])) for _, part, file in parts}
    count = int(parts[0][1]["count"] or len(parts))
    if len(kinds) > 1 or not len({number for number, *_ in parts}) == len(parts) == count:
        raise DatasetError(
            f"{folder} has the split '{split}' more than once, or not all of its parts (found: "
            f"{found}); leave one file of it, or all numbered parts of one"
        )
    return [file for _, _, file in sorted(parts, key=lambda part: part[0])]


def _read_file(file: Path) -> list[dict[str, Any]]:
    """Read the rows of a file, once unless it changes, since each step of a run asks for them."""
    return _read_rows(*_state(file))


def _state(file: Path) -> tuple[Path, int, int]:
    """Return a file that is there with the time of its last change and its size."""
    if kind_of(file) not in ROW_READERS:
        raise DatasetError(
            f"{file} is not a dataset we read: give a {', '.join(ROW_READERS)} file, "
            f"or a folder of them; see {locate(README)}"
        )
    try:
        state = file.stat()
    except FileNotFoundError as error:
        near = did_you_mean(str(file), map(str, file.parent.glob("*")))
        raise DatasetError(f"{file} does not exist{near or ';'} see {locate(README)}") from error
    except OSError as error:
        raise DatasetError(f"{file} cannot be opened ({error}); give another path") from error
    return file, state.st_mtime_ns, state.st_size


@lru_cache(maxsize=256)
def _read_rows(file: Path, _mtime: int, _size: int) -> list[dict[str, Any]]:
    return read_rows(file)


def _require(dataset: Path, number: int, row: Mapping[str, Any], columns: Sequence[str]) -> None:
    for column in columns:
        try:
            row[column]
        except DatasetError as error:
            raise DatasetError(f"row {number} of {dataset} {error}") from error
        except KeyError:
            raise DatasetError(
                f"row {number} of {dataset} has no column '{column}' (found: "
                f"{listed(row, MOST_NAMED)}){did_you_mean(column, row) or ';'} see {locate(README)}"
            ) from None


def is_padded(dataset: Path) -> bool:
    """Tell whether a file, or a file of a folder, is of Parquet, whose objects have equal keys."""
    return any(file.suffix == ".parquet" for file in data_files(dataset))


SYSTEM_ROLE = "system"


class _Text(Template):
    """A text that a teacher reads; `$column` or, of any name, `${column}` is one of the example."""

    braceidpattern = r"[^{}]+"


def choose_teacher(example: Mapping[str, Any], by: str, teachers: Container[str]) -> str:
    """Return the teacher that an example names; DatasetError if no teacher has that name."""
    if (name := str(example.get(by))) in teachers:
        return name
    raise DatasetError(
        f"an example names the teacher {name} by its column {by} ({str(example)[:80]}), and "
        "algorithm.teacher.models has none of that name; give one, as NAME=MODEL, or mend the "
        "column"
    )


def check_reads(text: str) -> None:
    """Refuse (ValueError) a text that is blank, or has a dollar that begins no column."""
    if not text.strip():
        raise ValueError("reads is blank; give a text, or leave it out")
    if not _Text(text).is_valid():
        raise ValueError(
            f"reads {text!r} has a $ that no column follows; write $column, or $$ for a dollar"
        )


def fill_reads(text: str, example: Mapping[str, Any]) -> str:
    """Return the text with the columns of an example; DatasetError if the example lacks one."""
    values: dict[str, str] = {}
    for column in _Text(text).get_identifiers():
        value = example.get(column)
        if value is None:
            raise DatasetError(
                f"an example has no {column}, which its teacher reads (found: "
                f"{', '.join(example)}); mend teacher.reads, or the data set"
            )
        values[column] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return _Text(text).substitute(values)


def read_before(text: str, messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Put a text before a conversation, as its system message.

    If the conversation begins with a system message, the text becomes the beginning of that
    message: templates take one system message, and most of them only as the first message.
    """
    if messages and messages[0]["role"] == SYSTEM_ROLE:
        first, *rest = messages
        return [{**first, "content": f"{text}\n\n{first['content']}"}, *rest]
    return [{"role": SYSTEM_ROLE, "content": text}, *messages]


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Read the rows of a file of a kind in ROW_READERS; DatasetError tells row and fault."""
    rows: list[dict[str, Any]] = []
    try:
        with _opened(file) as opened:
            check_memory(file.stat().st_size)
            for row in ROW_READERS[kind_of(file)](opened):
                check_row(row)
                rows.append(row)
    except BadFile as error:
        raise DatasetError(f"{file} {error}") from error
    except BadRow as error:
        raise DatasetError(f"row {len(rows)} of {file} {error}") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DatasetError(f"{file} is no whole gzip file; write it again") from error
    except OSError as error:
        raise DatasetError(f"{file} cannot be read ({error.strerror}); mend that") from error
    for number, row in enumerate(rows):
        if lost := getattr(row, "lost", None):
            said = "row %d of %s %s; such cells are left out of what agents are given"
            log.warning(said, number, file, next(iter(lost.values())))
            break
    return rows


def kind_of(file: Path) -> str:
    """Return the ending of a file's name that says how it is read."""
    return "".join(file.suffixes[-2:]) if file.suffix == ".gz" else file.suffix


@contextmanager
def _opened(file: Path) -> Iterator[IO[Any]]:
    """Open a file, a text unpacked and after the mark of UTF-8.

    Bytes that are no UTF-8 become halves of surrogate pairs, which no row may have.
    """
    with file.open("rb") as opened:
        if kind_of(file) == ".parquet":
            yield opened
            return
        with gzip.open(opened) if file.suffix == ".gz" else opened as unpacked:
            binary = cast(IO[bytes], unpacked)
            yield io.TextIOWrapper(binary, "utf-8-sig", errors="surrogateescape", newline="")


def _read_parquet(opened: IO[bytes]) -> Iterator[dict[str, Any]]:
    from ratchet.tasks.examples.parquet_rows import read_parquet  # loads slowly, with Arrow

    return read_parquet(opened)


ROW_READERS: Mapping[str, Callable[[IO[Any]], Iterator[Any]]] = {
    ".csv": read_csv,
    ".jsonl": read_json_lines,
    ".jsonl.gz": read_json_lines,
    ".json": read_json,
    ".parquet": _read_parquet,
}
"""Ending of a file's name → how its rows are read."""
