"""Parquet → rows of what JSON can say."""

from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from math import isinf, isnan
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ratchet.tasks.examples.faults import BadFile, BadRow, check_memory, check_value

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
            yield from _rows(batch, columns)
    except UNREADABLE_PARQUET as error:
        reason = str(error).strip().splitlines()[:1]
        said = f"cannot be read as Parquet ({(reason or ['damaged'])[0]:.100})"
        raise BadFile(said) from error


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
