"""A file → its rows, by value: JSON lines, a JSON array, CSV or Parquet.

Nothing is guessed: a path is opened as it is, and the first line of a CSV is its header. NaN,
which pandas writes for a missing value, is None; infinity is refused.
"""

import csv
import gzip
import io
import json
import logging
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from json import JSONDecoder
from math import inf, isnan
from pathlib import Path
from typing import IO, Any, NoReturn, cast
from uuid import UUID

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from ratchet.adapters.errors import UserError

ROWS_AT_ONCE = 1024
UNREADABLE_PARQUET = (pa.ArrowException, OSError, OverflowError, UnicodeDecodeError)
LONGEST_MESSAGE = 300
"""Characters of a refusal."""

log = logging.getLogger(__name__)


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
    for number, row in enumerate(rows):
        if isinstance(row, ParquetRow) and row.lost:
            said = "row %d of %s %s; such cells are left out of what agents are given"
            log.warning(said, number, file, next(iter(row.lost.values())))
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
            for cells in zip(*batch.columns, strict=True):
                yield ParquetRow(zip(batch.schema.names, cells, strict=True))
    except UNREADABLE_PARQUET as error:
        reason = str(error).strip().splitlines()[:1]
        said = f"cannot be read as Parquet ({(reason or ['damaged'])[0]:.100})"
        raise BadFile(said) from error


def _check_names(names: list[str]) -> None:
    if twice := [name for name in names if names.count(name) > 1]:
        raise BadFile(f"has the column {twice[0][:40]!r} twice; leave one out")


class ParquetRow(dict[str, Any]):
    """Row of Parquet, without the cells that JSON has not: who reads one gets a DatasetError."""

    def __init__(self, cells: Iterable[tuple[str, pa.Scalar]]) -> None:
        self.lost = dict[str, str]()
        for name, cell in cells:
            try:
                self[name] = _as_json(cell)
            except (ValueError, OverflowError, KeyError, BadRow) as error:
                self.lost[name] = f"has in its column {name[:40]!r} what JSON has not ({error})"

    def __missing__(self, name: str) -> NoReturn:
        if name not in self.lost:
            raise KeyError(name)
        raise DatasetError(f"{self.lost[name]}; write it as text, or leave it out")

    def get(self, key: str, default: Any = None, /) -> Any:
        return self[key] if key in self or key in self.lost else default


def _as_json(one: pa.Scalar) -> Any:
    """Return a value as JSON has it; ValueError if it has none."""
    if not one.is_valid:
        return None
    if isinstance(one, pa.DictionaryScalar):
        return _as_json(one.value)
    if isinstance(one, pa.StructScalar):
        return _object((field.name, _as_json(one[at])) for at, field in enumerate(one.type))
    if isinstance(one, pa.MapScalar):
        return _object((str(_as_json(pair[0])), _as_json(pair[1])) for pair in one.values)
    if isinstance(one, pa.ListScalar):
        return [_as_json(inner) for inner in one.values]
    return _digits_of_time(one) if pa.types.is_temporal(one.type) else _plain(one)


def _plain(one: pa.Scalar) -> str | float | None:
    """Return a number or a text. NaN is missing; bytes of UTF-8 are a text.

    A decimal with a scale is the text of its digits, and a float has those of its own width.
    """
    kind, value = one.type, one.as_py()
    if pa.types.is_decimal(kind):
        return f"{value:f}" if kind.scale > 0 else int(value)
    if pa.types.is_floating(kind):
        return None if isnan(value) else float(str(kind.to_pandas_dtype()(value)))
    if isinstance(value, bytes) and b"\0" not in value and not isinstance(one, pa.ExtensionScalar):
        return value.decode()
    if isinstance(value, str | int | UUID):
        return str(value) if isinstance(value, UUID) else value
    raise ValueError(f"of the type {kind}")


def _digits_of_time(one: pa.Scalar) -> str:
    """Write a date or a time as Python does, and nanoseconds, which it has not, as Arrow does."""
    kind = one.type
    if getattr(kind, "unit", "") == "ns" and one.value % 1000 and not pa.types.is_duration(kind):
        return one.cast(pa.string()).as_py()
    return str(one.as_py())


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


def _object(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; BadRow if it gives a name twice, since one value would be lost."""
    found = dict(pairs := [*pairs])
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
