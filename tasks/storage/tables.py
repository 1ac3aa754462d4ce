"""Queries to Arrow tables, and Arrow tables to Parquet files that carry their checksum."""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ratchet.tasks.storage.files import (
    BLANK,
    CHECKSUM_KEY,
    appearing,
    intact,
    query_beside,
    stamp,
)

ROWS_A_GROUP = 4096
PAGE_BYTES = 16 * 2**20
"""Size of a page, whose values are compressed together.

Prompts repeat each other, and the first ones of a page are stored in full: in the default of 1 MiB
that is each 26th prompt of 10,000 tokens.
"""


PRELUDE = query_beside(__file__, "prelude")
"""Macros that every query may use; it reads files by nothing else."""
GLOB_PATTERN = re.compile(r"[*?\[]")
"""What DuckDB takes for a pattern in a path."""


@cache
def _database(_: int) -> duckdb.DuckDBPyConnection:
    """Open the database of a process, by its id, which keeps the macros, and no rows or files.

    To open one takes longer than most queries, and a forked process cannot use its parent's.
    """
    database = duckdb.connect(config={"enable_external_file_cache": False})
    database.execute(PRELUDE)
    return database


def select(
    query: str, tables: Mapping[str, pa.Table] | None = None, **parameters: object
) -> pa.Table:
    """Run one statement; values enter as `$name` only. The rows keep the statement's order.

    A path among the values names one file, even if the path has stars or brackets. The statement
    may also read the named tables.
    """
    values = {name: _bindable(value) for name, value in parameters.items()}
    with _database(os.getpid()).cursor() as connection:
        for name, table in (tables or {}).items():
            connection.register(name, table)
        # `execute().to_arrow_table()` copies, and warns; `sql()` streams, in order.
        return connection.sql(query, params=values or None).to_arrow_table()


def write_table(table: pa.Table, path: Path) -> Path:
    """Write `table` to `path` as `write_parts` does."""
    return write_parts([table], table.schema, path)


def write_parts(
    parts: Iterable[pa.Table],
    schema: pa.Schema,
    path: Path,
    footer: Callable[[], Mapping[str, str]] = dict,
) -> Path:
    """Write rows to `path`: zstd, with token and log-probability lists byte-stream-split.

    Values are read back bit for bit. DuckDB's COPY would store the lists at twice the size. Each
    part is written before the next one is asked for, and the `footer` is asked for last.
    """
    numbers, lists = (pa.int32(), pa.float32()), (f for f in schema if pa.types.is_list(f.type))
    split = {f"{one.name}.list.element" for one in lists if one.type.value_type in numbers}
    with appearing(path) as aside:
        with pq.ParquetWriter(
            aside,
            schema,
            compression="zstd",
            # A list of columns is documented, though the stub says bool.
            use_dictionary=list(_leaves(schema) - split),  # pyright: ignore[reportArgumentType]
            column_encoding=dict.fromkeys(split, "BYTE_STREAM_SPLIT"),
            data_page_size=PAGE_BYTES,
        ) as writer:
            for part in parts:
                writer.write_table(part, row_group_size=ROWS_A_GROUP)
            writer.add_key_value_metadata({**footer(), CHECKSUM_KEY: BLANK})
        stamp(aside)
    return path


def row_groups(parts: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Yield the rows of at least one table, as many at a time as a row group has."""
    held: list[pa.Table] = []
    for part in parts:
        held.append(part)
        while sum(map(len, held)) > ROWS_A_GROUP:
            whole = pa.concat_tables(held)
            yield whole.slice(0, ROWS_A_GROUP)
            held = [whole.slice(ROWS_A_GROUP)]
    yield pa.concat_tables(held)


def read_parts(paths: Iterable[Path], columns: Sequence[str]) -> Iterator[pa.Table]:
    """Read columns of tables that were written here, a row group at a time; Damaged likewise.

    The next row group is decoded in a thread of its own meanwhile.
    """

    def row_groups() -> Iterator[pa.Table]:
        for path in paths:
            file = pq.ParquetFile(pa.BufferReader(intact(path)))
            for number in range(file.num_row_groups):
                yield file.read_row_group(number, columns=[*columns])

    groups = row_groups()
    with ThreadPoolExecutor(1) as thread:
        ahead = thread.submit(next, groups, None)
        while (part := ahead.result()) is not None:
            ahead = thread.submit(next, groups, None)
            yield part


def read_table(
    path: Path, columns: Sequence[str] | None = None, schema: pa.Schema | None = None
) -> pa.Table:
    """Read columns of a table that `write` wrote; Damaged if the file has changed since.

    With a `schema` a table of an earlier one is read as if it had it.
    """
    data, named = pa.BufferReader(intact(path)), None if columns is None else [*columns]
    if schema is not None:
        return pq.read_table(data, columns=named, schema=schema)
    file = pq.ParquetFile(data)
    # To share one row group out among threads takes longer than to decode it.
    return file.read(columns=named, use_threads=file.num_row_groups > 1)


def arrays(column: pa.ChunkedArray) -> list[np.ndarray]:
    """Return the lists of a column, each a read-only view of the column's values."""
    return [
        chunk.values.to_numpy()[start:end]
        for chunk in column.chunks
        for start, end in pairwise(chunk.offsets.to_numpy())
    ]


def flat_values(column: pa.ChunkedArray) -> np.ndarray:
    """Return the values of a column's lists, one list after the other."""
    return column.combine_chunks().flatten().to_numpy()


def _bindable(value: object) -> object:
    if isinstance(value, list):
        return [_bindable(item) for item in value]
    if not isinstance(value, Path):
        return value  # a path becomes a pattern of it alone; a relative one may look like a home
    return GLOB_PATTERN.sub(r"[\g<0>]", str(value.absolute()))


def _leaves(schema: pa.Schema) -> set[str]:
    return {
        f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name
        for field in schema
    }
