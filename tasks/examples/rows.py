"""A file → its rows, by value: JSON lines, a JSON array, CSV or Parquet.

Nothing is guessed: a path is opened as it is, and the first line of a CSV is its header. NaN,
which pandas writes for a missing value, is None; infinity is refused.
"""

import csv
import gzip
import io
import re
import stat
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from json import JSONDecodeError, JSONDecoder
from math import isfinite, isinf, isnan
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from ratchet.adapters.errors import UserError


class BadFile(Exception):
    """Fault of a file; its text goes on after the file's name."""


class BadRow(Exception):
    """Fault of the row that is being read; its text goes on after the row's number."""


def check_memory(size: int) -> None:
    """Refuse (BadFile) a file of so many unpacked bytes, which its rows take at least."""
    if size > psutil.virtual_memory().available // 2:
        raise BadFile(
            f"unpacks to {size / 2**30:.2f} GiB, which is more than half of the free memory; split "
            "the file, or leave rows out"
        )


def check_value(value: Any) -> None:
    """Refuse (BadRow) a value, also an inner one, that JSON lacks."""
    if isinstance(value, list | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            check_value(inner)
        for name in value if isinstance(value, dict) else ():
            check_value(name)
    elif isinstance(value, float) and not isfinite(value):
        raise BadRow("is infinite; give a number, or null")
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise BadRow(
                "holds half of a surrogate pair, which is no character; write the text anew"
            ) from error


def check_row(row: Any) -> None:
    """Refuse (BadRow) a row with a value that `check_value` refuses; name its column."""
    for column, value in row.items() if isinstance(row, dict) else [("0", row)]:
        try:
            check_value(column)
            check_value(value)
        except BadRow as error:
            raise BadRow(f"is refused: its column {column[:40]!r} {error}") from error


ROWS_AT_ONCE = 1024
UNREADABLE_PARQUET = (pa.ArrowException, OSError, OverflowError, UnicodeDecodeError)

Convert = Callable[[Any], Any]


def read_parquet_rows(opened: IO[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file."""
    try:
        file = pq.ParquetFile(opened)
        groups = map(file.metadata.row_group, range(file.num_row_groups))
        check_memory(sum(group.total_byte_size for group in groups))
        columns = _columns(file.schema_arrow)
        for batch in file.iter_batches(ROWS_AT_ONCE):
            yield from _batch_rows(batch, columns)
    except UNREADABLE_PARQUET as error:
        reason = str(error).strip().splitlines()[:1]
        said = f"cannot be read as Parquet ({(reason or ['damaged'])[0]:.100})"
        raise BadFile(said) from error


def _columns(schema: pa.Schema) -> dict[str, Convert | None]:
    """Map the columns to what makes JSON of their values; BadFile if two columns have one name."""
    if twice := [name for name in schema.names if schema.names.count(name) > 1]:
        raise BadFile(f"has the column {twice[0][:40]!r} twice; leave one out")
    return {field.name: _converter(field.type) for field in schema}


def _batch_rows(
    batch: pa.RecordBatch, columns: dict[str, Convert | None]
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a batch; if a row cannot be read, the rows before it come first."""
    try:
        read = _read_columns(batch, columns)
    except BadRow:
        if batch.num_rows == 1:
            raise
        for at in range(batch.num_rows):
            yield from _read_columns(batch.slice(at, 1), columns)
    else:
        yield from read


def _read_columns(
    batch: pa.RecordBatch, columns: dict[str, Convert | None]
) -> list[dict[str, Any]]:
    values: dict[str, Sequence[Any]] = {}
    for (name, convert), column in zip(columns.items(), batch.columns, strict=True):
        try:
            read = column.to_pylist(maps_as_pydicts="strict")
            values[name] = read if convert is None else [*map(convert, read)]
        except BadRow as error:
            raise BadRow(f"is refused: its column {name[:40]!r} {error}") from error
        except UnicodeDecodeError as error:
            raise BadRow(f"is refused: its column {name[:40]!r} is no UTF-8") from error
        except (ValueError, KeyError, TypeError) as error:
            raise BadRow(
                f"is refused: its column {name[:40]!r} has a value that JSON has not"
            ) from error
    return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]


def _converter(kind: pa.DataType) -> Convert | None:
    """Return what makes JSON of a column's values; None if they are JSON as they are."""
    if isinstance(kind, pa.BaseExtensionType):
        return _converter(kind.storage_type)
    if isinstance(kind, pa.DictionaryType):
        return _converter(kind.value_type)
    if isinstance(kind, pa.StructType):
        fields = {kind.field(at).name: kind.field(at).type for at in range(kind.num_fields)}
        if len(fields) < kind.num_fields:
            raise BadFile("has an object in which two columns have one name; leave one out")
        inner = {name: found for name, one in fields.items() if (found := _converter(one))}
        if not inner:
            return None
        return _optional(
            lambda value: {name: inner.get(name, _same)(one) for name, one in value.items()}
        )
    if isinstance(kind, pa.MapType):
        item = _converter(kind.item_type) or _same
        return _optional(lambda value: {str(name): item(one) for name, one in value.items()})
    if pa.types.is_nested(kind):
        element = _converter(kind.value_type)  # pyright: ignore[reportAttributeAccessIssue]
        return _optional(lambda value: [*map(element, value)]) if element else None
    return _scalar_converter(kind)


def _scalar_converter(kind: pa.DataType) -> Convert | None:
    same = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    if any(is_kind(kind) for is_kind in (*same, pa.types.is_boolean, pa.types.is_null)):
        return None
    if pa.types.is_integer(kind):
        return None
    if pa.types.is_float64(kind):
        return _optional(_finite)
    if pa.types.is_floating(kind):  # its digits are those of its own width
        return _optional(lambda value: _finite(float(str(np.float32(value)))))
    return _optional(_written)


def _finite(value: float) -> float | None:
    """Return a number; None for NaN, which says that the value is missing."""
    if isinf(value):
        check_value(value)
    return None if isnan(value) else value


def _written(value: Any) -> Any:
    """Return the number of a decimal, and the text of a date, of a time or of bytes."""
    if isinstance(value, Decimal):
        return _finite(float(value))
    if isinstance(value, bytes):
        return value.decode("ascii", "backslashreplace")
    return str(value)


def _optional(convert: Convert) -> Convert:
    return lambda value: None if value is None else convert(value)


def _same(value: Any) -> Any:
    return value


SURROGATES = "\\ud", "\\uD"
"""Beginnings of escapes for a half of a character."""
SPACE = re.compile(r"[ \t\r\n]*")

LONGEST_MESSAGE, LONGEST_PATH_TOLD = 300, 110
"""Characters of a refusal, and of the path in it."""
BOM = b"\xef\xbb\xbf"
OTHER_ENCODINGS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"\0\0\xfe\xff": "UTF-32"}
"""First bytes of a text → its encoding."""


class DatasetError(UserError):
    """Refusal of a dataset that cannot be read as the recipe asks, in few words."""

    def __init__(self, message: str) -> None:
        if len(message) > LONGEST_MESSAGE:
            end = LONGEST_MESSAGE // 3
            message = f"{message[: LONGEST_MESSAGE - end - 3]} … {message[-end:]}"
        super().__init__(message)


def kind_of(file: Path) -> str:
    """Return the ending of a file's name that says how it is read."""
    return "".join(file.suffixes[-2:]) if file.suffix == ".gz" else file.suffix


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Read the rows of a file of a kind in ROW_READERS; DatasetError tells row and fault."""
    rows: list[dict[str, Any]] = []
    named = name_file(file)
    try:
        with _opened(file) as opened:
            check_memory(file.stat().st_size)
            for row in ROW_READERS[kind_of(file)](opened):
                if not isinstance(row, dict):
                    raise BadRow(f"is no JSON object: {row!r:.60}; give an object a row")
                rows.append(cast(dict[str, Any], row))
    except BadFile as error:
        raise DatasetError(f"{named} {error}") from error
    except BadRow as error:
        raise DatasetError(f"row {len(rows)} of {named} {error}") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DatasetError(f"{named} is no whole gzip file; write it again") from error
    except OSError as error:
        raise DatasetError(f"{named} cannot be read ({error.strerror}); mend that") from error
    return rows


def name_file(file: Path) -> str:
    """Return the path of a file for a message; a long path shows its end."""
    name = str(file)
    return name if len(name) <= LONGEST_PATH_TOLD else f"…{name[-LONGEST_PATH_TOLD:]}"


@contextmanager
def _opened(file: Path) -> Iterator[IO[bytes]]:
    """Open a regular file, after the mark of UTF-8 and unpacked; nothing waits for another kind."""
    if not stat.S_ISREG(file.stat().st_mode):
        raise BadFile("is a pipe, a device or a folder; give a file")
    with file.open("rb") as opened:
        if kind_of(file) == ".parquet":
            yield opened
            return
        with gzip.open(opened) if file.suffix == ".gz" else opened as unpacked:
            _skip_mark(cast(IO[bytes], unpacked))
            yield cast(IO[bytes], unpacked)


def _skip_mark(opened: IO[bytes]) -> None:
    begins = opened.read(4)
    for mark, encoding in OTHER_ENCODINGS.items():
        if begins.startswith(mark):
            raise BadFile(f"is in {encoding}; write it in UTF-8")
    opened.seek(len(BOM) if begins.startswith(BOM) else 0)


def _read_csv(opened: IO[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a CSV: texts, and None for an empty cell."""
    csv.field_size_limit(sys.maxsize)
    lines = csv.reader(_lines(opened), strict=True)
    try:
        header = next(lines, None)
        if header is None:
            return
        names = [name or f"column{at}" for at, name in enumerate(header)]
        if twice := [name for name in names if names.count(name) > 1]:
            raise BadFile(f"has the column {twice[0][:40]!r} twice; leave one out")
        for cells in lines:
            if not cells:
                continue
            if len(cells) != len(names):
                raise BadRow(f"has {len(cells)} cells, and the header {len(names)}; mend the line")
            yield {name: cell or None for name, cell in zip(names, cells, strict=True)}
    except csv.Error as error:
        raise BadRow(f"is no CSV ({error}); mend its quotes") from error


def _lines(opened: IO[bytes]) -> Iterator[str]:
    """Yield the lines of a text as they are, with their ends."""
    for line in io.TextIOWrapper(opened, encoding="utf-8", errors="surrogateescape", newline=""):
        try:
            line.encode()
        except UnicodeEncodeError as error:
            raise BadRow("is no UTF-8; write the file in UTF-8") from error
        yield line


def _read_json_lines(opened: IO[bytes]) -> Iterator[Any]:
    """Yield the row of each line that is not blank."""
    for line in opened:
        if text := _decode(line).strip():
            row, end = _parse(text, 0)
            if end < len(text):
                raise BadRow(
                    f"goes on after its object with {text[end : end + 20]!r}; give an object a line"
                )
            yield row


def _read_json_array(opened: IO[bytes]) -> Iterator[Any]:
    """Yield the rows of one array, or of JSON lines, since some files of lines end in .json."""
    begins = opened.read(1)
    while begins.isspace():
        begins = opened.read(1)
    opened.seek(-len(begins), 1)
    if begins != b"[":
        yield from _read_json_lines(opened)
        return
    text = _decode(opened.read())
    at = _skip(text, 1)
    while text[at : at + 1] != "]" or text[at - 1] == ",":
        row, end = _parse(text, at)
        yield row
        at = _skip(text, end)
        if text[at : at + 1] == ",":
            at = _skip(text, at + 1)
        elif text[at : at + 1] != "]":
            raise BadRow(f"has {text[at : at + 20]!r} before it in place of a comma; mend that")
    if text[_skip(text, at + 1) :]:
        raise BadFile("goes on after its array; give one array, or an object a line")


def _parse(text: str, at: int) -> tuple[Any, int]:
    """Parse the value that begins at a place; return it and the place after it."""
    try:
        row, end = DECODER.raw_decode(text, at)
        if any(text.find(half, at, end) >= 0 for half in SURROGATES):
            check_row(row)
    except _Infinite:
        check_row(JSONDecoder().raw_decode(text, at)[0])
        raise
    except JSONDecodeError as error:
        shown = text[error.pos : error.pos + 20]
        raise BadRow(f"is no JSON ({error.msg} at {shown!r}); mend that") from error
    except RecursionError as error:
        raise BadRow("nests lists and objects too deep; give flatter ones") from error
    except ValueError as error:  # Python reads no longer integer
        raise BadRow("has an integer of thousands of digits; give a number, or a text") from error
    return row, end


class _Infinite(BadRow):
    """An infinite number, whose column is not known yet."""


def _read_constant(name: str) -> None:
    if name != "NaN":
        raise _Infinite(f"holds {name}; give a number, or null")


def _read_float(digits: str) -> float:
    number = float(digits)
    if isinf(number):
        raise _Infinite(f"holds {digits:.20}; give a number, or null")
    return number


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; BadRow if it gives a name twice, since one value would be lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadRow(f"gives {twice[:40]!r} twice in one object; leave one out")
    return found


DECODER = JSONDecoder(
    parse_constant=_read_constant, parse_float=_read_float, object_pairs_hook=_object
)
"""Reader of what Python and pandas write: NaN says that a value is missing."""


def _decode(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise BadRow(
            f"is no UTF-8 (byte {error.start} is {line[error.start]:#x}); write the file in UTF-8"
        ) from error


def _skip(text: str, at: int) -> int:
    """Return the place after white space."""
    found = SPACE.match(text, at)
    assert found is not None, "white space may be empty"
    return found.end()


ROW_READERS: Mapping[str, Callable[[IO[bytes]], Iterator[Any]]] = {
    ".csv": _read_csv,
    ".jsonl": _read_json_lines,
    ".jsonl.gz": _read_json_lines,
    ".json": _read_json_array,
    ".parquet": read_parquet_rows,
}
"""Ending of a file's name → how its rows are read."""
