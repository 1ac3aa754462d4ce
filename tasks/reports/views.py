"""All spans of a run, from its journals and its Parquet files, as one view."""

import duckdb
import pyarrow as pa

from tasks.journal import read_spans
from tasks.spans import SCHEMA
from tasks.storage.checksums import verified
from tasks.storage.run_folder import RunFolder
from tasks.storage.tables import query_beside

QUERY = query_beside(__file__)


def spans_view(run: RunFolder) -> duckdb.DuckDBPyConnection:
    """Open a connection with the view `spans`: all that the run has recorded until now.

    Every file is checked first, and a damaged one is refused (Damaged). The torn end of a journal
    does not count; a call that is being answered shows as begun. The columns are those of
    `tasks.spans.SCHEMA`. Close the connection, or use it in a `with`.
    """
    sealed, journals = run.all_spans()
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
