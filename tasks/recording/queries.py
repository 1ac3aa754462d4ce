"""Questions to runs in SQL, and their rows as a table, CSV, JSON or Parquet."""

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import duckdb
import pyarrow.parquet as pq
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ratchet.adapters.errors import UserError, counted
from ratchet.adapters.process.terminal import on_one_line, terminal_width, visible
from ratchet.tasks.recording.views import VIEWS, open_views, views_in
from ratchet.tasks.storage.run_folder import RunFolder

MOST_ROWS = 100
"""Rows that a table shows; the other formats have all."""
NARROWEST_READABLE = 8
"""Characters of the narrowest readable column."""
MOST_LETTERS, MOST_ELEMENTS = 600, 12
"""Letters of a text and elements of a list that a cell shows; the other formats have all."""


def answer_query(statement: str, runs: Sequence[RunFolder], format: str) -> bytes:
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
            f"{error}\nThe views are {', '.join(VIEWS)}; a run has steps, trajectories, datums "
            "and tokens from its first step on, and texts or pairs if it learns them"
        ) from error
    except duckdb.Error as error:
        raise UserError(str(error)) from error


def _table(rows: duckdb.DuckDBPyRelation) -> bytes:
    """Write a table as wide as the terminal, or a block a row if it has too many columns."""
    names, shown = rows.columns, rows.limit(MOST_ROWS).fetchall()
    texts = [[_shown(value) for value in row] for row in shown]
    width = terminal_width()
    file = io.StringIO()
    console = Console(file=file, width=width, markup=False, highlight=False, emoji=False)
    if len(names) * (NARROWEST_READABLE + 3) <= width:
        console.print(_grid(names, texts))
    else:
        for number, row in enumerate(texts, 1):
            console.print(_grid([f"row {number}", ""], zip(names, row, strict=True)))
    if (left := len(rows) - len(shown)) > 0:
        console.print(f"{counted(left, 'more row')}; --format csv has all")
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines()).encode()


def _grid(names: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Lay cells out; their text is wrapped at words."""
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in names:
        grid.add_column(Text(on_one_line(name)), overflow="fold")
    for row in rows:
        grid.add_row(*map(Text, row))
    return grid


def _shown(value: object) -> str:
    """Return a value as a cell shows it: three decimals, and the beginning of what is long.

    A text of white space alone, such as a token's, is written by escapes.
    """
    match value:
        case None:
            return "-"
        case float():
            return f"{value:.3f}" if value == 0 or 1e-3 <= abs(value) < 1e9 else f"{value:.3g}"
        case list() if len(value) > MOST_ELEMENTS:
            return f"{_shown(value[:MOST_ELEMENTS])[:-1]}, … {len(value)} in all]"
        case list():
            return f"[{', '.join(map(_shown, value))}]"
        case _:
            text = str(value)
            text = repr(text)[1:-1] if text.isspace() else visible(text)
            return text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]}…"


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
    """Return the rows as values of JSON; NaN and infinity, which JSON lacks, are null."""
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
