"""Questions to runs in SQL, and their rows as a table, CSV, JSON or Parquet."""

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any

import duckdb
import pyarrow.parquet as pq

from adapters.errors import UserError
from tasks.recording.views import VIEWS, open_views, views_in
from tasks.storage.run_folder import RunFolder

WIDTH = 160
"""Characters of a table's line."""
MOST_ROWS = 100
"""Rows that a table shows; the other formats have all."""


def answer(statement: str, runs: Sequence[RunFolder], format: str) -> bytes:
    """Return the rows of one statement over the views of runs, in a format of WRITERS.

    UserError says what is wrong with a statement, or what it may not do.
    """
    try:
        with open_views(runs, views_in(statement)) as connection:
            rows = connection.sql(statement)
            return b"" if rows is None else WRITERS[format](rows)
    except duckdb.PermissionException as error:
        raise UserError(
            f"{error}. A statement reads the views {', '.join(VIEWS)}, and writes nothing: "
            "--format and --out write its rows to a file"
        ) from error
    except duckdb.CatalogException as error:
        raise UserError(
            f"{error}\nThe views are {', '.join(VIEWS)}; a run has steps, trajectories and datums "
            "from its first step on"
        ) from error
    except duckdb.Error as error:
        raise UserError(str(error)) from error


def _table(rows: duckdb.DuckDBPyRelation) -> bytes:
    with redirect_stdout(io.StringIO()) as shown:
        rows.show(max_width=WIDTH, max_rows=MOST_ROWS)
    return shown.getvalue().encode()


def _csv(rows: duckdb.DuckDBPyRelation) -> bytes:
    """Write a header and a line a row; a list or a structure is JSON, and null is empty."""
    file = io.StringIO()
    lines = csv.writer(file, lineterminator="\n")
    records = _records(rows)
    lines.writerow(records[0] if records else rows.columns)
    lines.writerows([_cell(value) for value in record.values()] for record in records)
    return file.getvalue().encode()


def _json(rows: duckdb.DuckDBPyRelation) -> bytes:
    """Write an array of objects, a line each."""
    lines = (json.dumps(record, ensure_ascii=False) for record in _records(rows))
    return f"[{f',{chr(10)} '.join(lines)}]\n".encode()


def _parquet(rows: duckdb.DuckDBPyRelation) -> bytes:
    file = io.BytesIO()
    pq.write_table(rows.to_arrow_table(), file, compression="zstd")
    return file.getvalue()


def _records(rows: duckdb.DuckDBPyRelation) -> list[dict[str, Any]]:
    """Return the rows as values of JSON; a number that is not finite, which JSON lacks, is null."""
    texts = rows.query("answered", "select to_json(answered)::varchar from answered")
    assert texts is not None
    return [json.loads(text, parse_constant=lambda _: None) for (text,) in texts.fetchall()]


def _cell(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


WRITERS: Mapping[str, Callable[[duckdb.DuckDBPyRelation], bytes]] = {
    "table": _table,
    "csv": _csv,
    "json": _json,
    "parquet": _parquet,
}
"""Format → the function that writes rows in it."""
