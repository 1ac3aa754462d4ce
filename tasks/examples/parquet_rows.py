"""Parquet → rows of what JSON can say, bounded before values are unpacked.

A few bytes can say that a long value is repeated: texts are read as entries of their dictionary,
and a row is made only when its size is known and can be afforded.
"""

import atexit
import os
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from math import isinf, isnan
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from adapters.process.child import LimitedChild, LimitMet, answer_questions
from tasks.examples.bounds import (
    LONGEST_ROW,
    BadFile,
    BadRow,
    RowMemory,
    check_columns,
    check_value,
)

ROWS_AT_ONCE, BYTES_AT_ONCE = 1024, 2**26
DELTA_ENCODING = "DELTA_"
"""Beginning of the encodings that are read without a dictionary."""

LONGEST_MEASURE = 10.0
"""Seconds of processor time that measuring a file may take."""
MEASURING_MEMORY = 2**30
"""Bound on the memory of the process that measures files, in bytes."""
UNREADABLE_PARQUET = (pa.ArrowException, OSError, OverflowError, UnicodeDecodeError)

Convert = Callable[[Any], Any]


def read_parquet_rows(opened: IO[bytes], memory: RowMemory) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file."""
    try:
        check_columns(pq.read_metadata(opened).num_columns)
        measured = _ask(str(Path(opened.name).absolute()))
        memory.take(measured["text"], measured["values"], measured["rows"])
        opened.seek(0)
        file = pq.ParquetFile(opened, read_dictionary=measured["texts"])
        columns = _columns(file.schema_arrow)
        for batch in file.iter_batches(measured["rows_at_once"]):
            for part in _affordable(batch, memory):
                yield from _rows(part, columns)
    except UNREADABLE_PARQUET as error:
        raise BadFile(_say_unreadable(error)) from error


def _ask(path: str) -> dict[str, Any]:
    """Have the child measure a file; BadFile if it is damaged, or its own description too large.

    pyarrow may end its process when it reads damaged statistics of a column.
    """
    try:
        answer = _child.ask(path, LONGEST_MEASURE)
    except LimitMet:
        raise BadFile("cannot be read as Parquet (its description is damaged)") from None
    if isinstance(answer, str):
        raise BadFile(answer)
    return answer


_child = LimitedChild("tasks.examples.parquet_rows", MEASURING_MEMORY)
atexit.register(_child.close)


def _measure(path: str) -> object:
    """Return a file's description of itself, or why it cannot be read.

    The description has how many values, bytes of fixed length and rows it has, its columns that are
    read as entries of a dictionary, and how many rows are decoded at once.
    """
    try:
        with Path(path).open("rb") as file:
            metadata = pq.read_metadata(file)
        values, text = _count_values(metadata)
        return {
            "values": values,
            "text": text,
            "rows": metadata.num_rows,
            "texts": _texts(metadata),
            "rows_at_once": _rows_at_once(metadata),
        }
    except (*UNREADABLE_PARQUET, IndexError) as error:
        return _say_unreadable(error)


def _say_unreadable(error: Exception) -> str:
    reason = str(error).strip().splitlines()[:1]
    return f"cannot be read as Parquet ({(reason or ['damaged'])[0]:.100})"


def _count_values(metadata: pq.FileMetaData) -> tuple[int, int]:
    """Return the values of a file, and the bytes of those that have a fixed length."""
    values = text = 0
    for group in range(metadata.num_row_groups):
        for column in range(metadata.num_columns):
            chunk = metadata.row_group(group).column(column)
            values += chunk.num_values
            text += chunk.num_values * max(0, metadata.schema.column(column).length)
    return values, text


def _texts(metadata: pq.FileMetaData) -> list[str]:
    """List the columns of texts and bytes, which can be read as entries of a dictionary."""
    columns = [metadata.schema.column(number) for number in range(metadata.num_columns)]
    delta = {chunk.path_in_schema for chunk in _delta_chunks(metadata)}
    return [
        column.path
        for column in columns
        if column.physical_type == "BYTE_ARRAY"
        and column.converted_type != "DECIMAL"
        and column.path not in delta
    ]


def _rows_at_once(metadata: pq.FileMetaData) -> int:
    """Return how many rows are decoded at once; a delta may repeat a long value in each of them."""
    largest = max((chunk.total_uncompressed_size for chunk in _delta_chunks(metadata)), default=0)
    return min(ROWS_AT_ONCE, 1 + BYTES_AT_ONCE // largest) if largest > 0 else ROWS_AT_ONCE


def _delta_chunks(metadata: pq.FileMetaData) -> list[pq.ColumnChunkMetaData]:
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    chunks = [group.column(number) for group in groups for number in range(group.num_columns)]
    return [
        chunk
        for chunk in chunks
        if chunk.physical_type == "BYTE_ARRAY"
        and any(encoding.startswith(DELTA_ENCODING) for encoding in chunk.encodings)
    ]


def _affordable(batch: pa.RecordBatch, memory: RowMemory) -> Iterator[pa.RecordBatch]:
    """Yield a batch in parts of bounded size; BadRow if a row alone is too large."""
    size = sum(map(_size, batch.columns))
    if size <= BYTES_AT_ONCE and (size <= LONGEST_ROW or batch.num_rows > 1):
        memory.take(size, 0, 0)
        yield batch
    elif batch.num_rows == 1:
        raise BadRow(f"is longer than {LONGEST_ROW // 2**20} MiB; give shorter ones")
    else:
        half = batch.num_rows // 2
        yield from _affordable(batch.slice(0, half), memory)
        yield from _affordable(batch.slice(half), memory)


def _size(array: pa.Array) -> int:
    """Return the bytes of an array with every entry of a dictionary as often as it is named."""
    kind = array.type
    if isinstance(array, pa.DictionaryArray):
        lengths = pc.call_function("binary_length", [array.dictionary]).take(array.indices)
        return pc.call_function("sum", [lengths]).as_py() or 0
    if pa.types.is_struct(kind):
        return sum(map(_size, array.flatten()))
    if isinstance(array, pa.MapArray):
        start, end = array.offsets[0].as_py(), array.offsets[-1].as_py()
        return sum(_size(one.slice(start, end - start)) for one in (array.keys, array.items))
    if pa.types.is_nested(kind):
        return _size(array.flatten())
    return array.nbytes


def _columns(schema: pa.Schema) -> dict[str, Convert | None]:
    """Map the columns to what makes JSON of their values; BadFile if two columns have one name."""
    if twice := [name for name in schema.names if schema.names.count(name) > 1]:
        raise BadFile(f"has the column {twice[0][:40]!r} twice; leave one out")
    return {field.name: _converter(field.type) for field in schema}


def _rows(batch: pa.RecordBatch, columns: dict[str, Convert | None]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a batch; if a row cannot be read, the rows before it come first."""
    try:
        read = _read(batch, columns)
    except BadRow:
        if batch.num_rows == 1:
            raise
        for at in range(batch.num_rows):
            yield from _read(batch.slice(at, 1), columns)
    else:
        yield from read


def _read(batch: pa.RecordBatch, columns: dict[str, Convert | None]) -> list[dict[str, Any]]:
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
        return _optional(lambda value: _convert_fields(value, inner)) if inner else None
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


def _convert_fields(value: dict[str, Any], inner: dict[str, Convert]) -> dict[str, Any]:
    return {name: inner.get(name, _same)(one) for name, one in value.items()}


def _optional(convert: Convert) -> Convert:
    return lambda value: None if value is None else convert(value)


def _same(value: Any) -> Any:
    return value


if __name__ == "__main__":
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # on which C++ would say why the process ends
    answer_questions(_measure, MEASURING_MEMORY)
