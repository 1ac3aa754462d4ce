"""A file → its rows, by value: JSON lines, a JSON array, CSV or Parquet.

Nothing is guessed: a path is opened as it is, and the first line of a CSV is its header. NaN,
which pandas writes for a missing value, is None; infinity is refused.
"""

import csv
import gzip
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from decimal import Decimal
from json import JSONDecoder
from math import inf, isnan
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from ratchet.adapters.errors import UserError

ROWS_AT_ONCE = 1024
UNREADABLE_PARQUET = (pa.ArrowException, OSError, OverflowError, UnicodeDecodeError)
LONGEST_MESSAGE = 300
"""Characters of a refusal."""


class DatasetError(UserError):
    """Refusal of a dataset that cannot be read as the recipe asks, in few words."""

    def __init__(self, message: str) -> None:
        if len(message) > LONGEST_MESSAGE:
            end = LONGEST_MESSAGE // 3
            message = f"{message[: LONGEST_MESSAGE - end - 3]} … {message[-end:]}"
        super().__init__(message)


class BadFile(Exception):
    """Fault of a file; its text goes on after the file's name."""


class BadRow(Exception):
    """Fault of the row that is being read; its text goes on after the row's number."""


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Read the rows of a file of a kind in ROW_READERS; DatasetError tells row and fault."""
    rows: list[dict[str, Any]] = []
    try:
        with _opened(file) as opened:
            _check_memory(file.stat().st_size)
            for row in ROW_READERS[kind_of(file)](opened):
                _check_row(row)
                rows.append(row)
    except BadFile as error:
        raise DatasetError(f"{file} {error}") from error
    except BadRow as error:
        raise DatasetError(f"row {len(rows)} of {file} {error}") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DatasetError(f"{file} is no whole gzip file; write it again") from error
    except OSError as error:
        raise DatasetError(f"{file} cannot be read ({error.strerror}); mend that") from error
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


def _check_memory(size: int) -> None:
    """Refuse (BadFile) a file of so many unpacked bytes, which its rows take at least."""
    if size > psutil.virtual_memory().available // 2:
        raise BadFile(
            f"unpacks to {size / 2**30:.2f} GiB, which is more than half of the free memory; split "
            "the file, or leave rows out"
        )


def _check_row(row: Any) -> None:
    """Refuse (BadRow) a row that is no object, or has a value that JSON lacks."""
    if not isinstance(row, dict):
        raise BadRow(f"is no JSON object: {row!r:.60}; give an object a row")
    try:
        json.dumps(row, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        before = error.object[max(0, error.start - 20) : error.start]
        raise BadRow(
            f"has behind {before!r} what is no UTF-8, or half of a surrogate pair; write it anew"
        ) from error
    except (ValueError, RecursionError) as error:
        raise BadRow(
            f"has an infinite number, or nests too deep ({error}); give a number, or null"
        ) from error


def _read_parquet(opened: IO[bytes]) -> Iterator[dict[str, Any]]:
    try:
        file = pq.ParquetFile(opened)
        groups = map(file.metadata.row_group, range(file.num_row_groups))
        _check_memory(sum(group.total_byte_size for group in groups))
        _check_names(file.schema_arrow.names)
        for batch in file.iter_batches(ROWS_AT_ONCE):
            columns = [_read_column(*one) for one in zip(batch.schema, batch.columns, strict=True)]
            for row in zip(*columns, strict=True):
                yield dict(zip(batch.schema.names, row, strict=True))
    except UNREADABLE_PARQUET as error:
        reason = str(error).strip().splitlines()[:1]
        said = f"cannot be read as Parquet ({(reason or ['damaged'])[0]:.100})"
        raise BadFile(said) from error


def _check_names(names: list[str]) -> None:
    if twice := [name for name in names if names.count(name) > 1]:
        raise BadFile(f"has the column {twice[0][:40]!r} twice; leave one out")


def _read_column(field: pa.Field, column: pa.Array) -> list[Any]:
    # The digits of a number that is no double are those of its own width.
    narrow = "double" not in str(field.type)
    try:
        return [_as_json(one, narrow) for one in column.to_pylist(maps_as_pydicts="strict")]
    except (ValueError, KeyError, TypeError) as error:
        raise BadFile(
            f"has the column {field.name[:40]!r} with a value that JSON has not: {error}"
        ) from error


def _as_json(value: Any, narrow: bool) -> Any:
    """Return a value as JSON has it: NaN is missing, and a date, a time or bytes are a text."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float | Decimal):
        number = float(str(np.float32(value))) if narrow and isinstance(value, float) else value
        return None if isnan(number) else float(number)
    if isinstance(value, list):
        return [_as_json(one, narrow) for one in cast(list[Any], value)]
    if isinstance(value, dict):
        pairs = cast(dict[Any, Any], value).items()
        return {str(name): _as_json(one, narrow) for name, one in pairs}
    return value.decode("ascii", "backslashreplace") if isinstance(value, bytes) else str(value)


def _read_csv(opened: IO[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a CSV: texts, and None for an empty cell."""
    csv.field_size_limit(sys.maxsize)
    lines = csv.reader(opened, strict=True)
    try:
        names = [name or f"column{at}" for at, name in enumerate(next(lines, []))]
        _check_names(names)
        for cells in filter(None, lines):
            if len(cells) != len(names):
                raise BadRow(f"has {len(cells)} cells, and the header {len(names)}; mend the line")
            yield {name: cell or None for name, cell in zip(names, cells, strict=True)}
    except csv.Error as error:
        raise BadRow(f"is no CSV ({error}); mend its quotes") from error


def _read_json_lines(opened: IO[str]) -> Iterator[Any]:
    """Yield the row of each line that is not blank."""
    return (_parse(line) for line in opened if not line.isspace())


def _read_json(opened: IO[str]) -> Iterator[Any]:
    """Yield the rows of one array, or of JSON lines, since some files of lines end in .json."""
    text = opened.read()
    if not text.lstrip().startswith("["):
        yield from _read_json_lines(io.StringIO(text))
        return
    try:
        yield from _parse(text)
    except BadRow as error:
        raise BadFile(str(error)) from error


def _parse(text: str) -> Any:
    try:
        return DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"is no JSON ({error}); mend that") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; BadRow if it gives a name twice, since one value would be lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadRow(f"gives {twice[:40]!r} twice in one object; leave one out")
    return found


DECODER = JSONDecoder(
    parse_constant={"NaN": None, "Infinity": inf, "-Infinity": -inf}.get, object_pairs_hook=_object
)
"""Reader of what Python and pandas write: NaN says that a value is missing."""


ROW_READERS: Mapping[str, Callable[[IO[Any]], Iterator[Any]]] = {
    ".csv": _read_csv,
    ".jsonl": _read_json_lines,
    ".jsonl.gz": _read_json_lines,
    ".json": _read_json,
    ".parquet": _read_parquet,
}
"""Ending of a file's name → how its rows are read."""
