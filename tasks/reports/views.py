"""A run's journals and Parquet files → one view of its spans."""

from pathlib import Path

import duckdb
import pyarrow as pa

from tasks.journal import read_spans
from tasks.spans import SCHEMA
from tasks.storage.checksums import verified

QUERY = Path(__file__).with_suffix(".sql").read_text(encoding="utf-8")


def spans_view(folder: Path) -> duckdb.DuckDBPyConnection:
    """A connection whose view `spans` is all that was recorded in the run at `folder` until now.

    Every file is checked first: one that is damaged is refused and not read in part. Of a journal
    what is torn off its end does not count; a call that is under way shows as begun. The columns
    are those of `tasks.spans.SCHEMA`. Close the connection, or use it in a `with`.
    """
    sealed = sorted((folder / "spans").glob("*.parquet"))
    batches = {path.stem for path in sealed}
    journals = [
        path for path in sorted((folder / "journal").glob("*.jsonl")) if path.stem not in batches
    ]
    tables = [SCHEMA.empty_table(), *map(read_spans, journals)]
    connection = duckdb.connect()
    connection.register("journalled", pa.concat_tables(tables))
    if sealed:
        files = [str(verified(path)) for path in sealed]
        connection.read_parquet(files, union_by_name=True).create_view("sealed")
    else:
        connection.register("sealed", SCHEMA.empty_table())
    connection.execute(QUERY)
    return connection
