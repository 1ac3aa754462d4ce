"""A query and its parameters → an Arrow table → Parquet, whole."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tasks.storage.checksums import BLANK, KEY, intact, stamp
from tasks.storage.files import appearing

ROWS_A_GROUP = 4096


def select(query: str, **parameters: object) -> pa.Table:
    """The rows of one statement, in the order it asks for; values enter as `$name` only."""
    values = {name: _bindable(value) for name, value in parameters.items()}
    with duckdb.connect() as connection:
        # `execute().to_arrow_table()` copies, and warns; `sql()` streams, in order.
        return connection.sql(query, params=values or None).to_arrow_table()


def write(table: pa.Table, path: Path) -> Path:
    """`path`, holding `table`: zstd, with token and log-probability lists byte-stream-split.

    Read-back is bit-exact. DuckDB's own COPY would store those lists plain, at twice the size.
    """
    split = {f"{field.name}.list.element" for field in table.schema if _is_numeric_list(field.type)}
    with appearing(path) as aside:
        with pq.ParquetWriter(
            aside,
            table.schema,
            compression="zstd",
            # A list of columns is documented, though the stub says bool.
            use_dictionary=list(_leaves(table.schema) - split),  # pyright: ignore[reportArgumentType]
            column_encoding=dict.fromkeys(split, "BYTE_STREAM_SPLIT"),
        ) as writer:
            writer.write_table(table, row_group_size=ROWS_A_GROUP)
            writer.add_key_value_metadata({KEY: BLANK})
        stamp(aside)
    return path


def read(
    path: Path, columns: Sequence[str] | None = None, schema: pa.Schema | None = None
) -> pa.Table:
    """What `write` wrote there; a file that has changed since is refused (Damaged)."""
    return pq.read_table(
        pa.BufferReader(intact(path)),
        columns=None if columns is None else [*columns],
        schema=schema,
    )


def arrays(column: pa.ChunkedArray) -> list[np.ndarray]:
    """The lists of a column, each a read-only view of the column's values."""
    return [
        chunk.values.to_numpy()[start:end]
        for chunk in column.chunks
        for start, end in pairwise(chunk.offsets.to_numpy())
    ]


def _bindable(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


def _is_numeric_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) and kind.value_type in (pa.int32(), pa.float32())


def _leaves(schema: pa.Schema) -> set[str]:
    return {
        f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name
        for field in schema
    }
