"""A file of Parquet → its rows, by value. A cell that JSON has not is left out."""

from collections.abc import Iterable, Iterator
from math import isnan
from typing import IO, Any, NoReturn
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq

from ratchet.tasks.examples.rows import (
    BadFile,
    BadRow,
    DatasetError,
    as_object,
    check_memory,
    check_names,
)

ROWS_AT_ONCE = 1024
UNREADABLE_PARQUET = (pa.ArrowException, OSError, OverflowError, UnicodeDecodeError)


def read_parquet(opened: IO[bytes]) -> Iterator[dict[str, Any]]:
    try:
        file = pq.ParquetFile(opened)
        groups = map(file.metadata.row_group, range(file.num_row_groups))
        check_memory(sum(group.total_byte_size for group in groups))
        check_names(file.schema_arrow.names)
        for batch in file.iter_batches(ROWS_AT_ONCE):
            for cells in zip(*batch.columns, strict=True):
                yield ParquetRow(zip(batch.schema.names, cells, strict=True))
    except UNREADABLE_PARQUET as error:
        reason = str(error).strip().splitlines()[:1]
        said = f"cannot be read as Parquet ({(reason or ['damaged'])[0]:.100})"
        raise BadFile(said) from error


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
        return as_object((field.name, _as_json(one[at])) for at, field in enumerate(one.type))
    if isinstance(one, pa.MapScalar):
        return as_object((str(_as_json(pair[0])), _as_json(pair[1])) for pair in one.values)
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
