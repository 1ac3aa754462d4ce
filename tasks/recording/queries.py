"""Questions to runs: a statement of SQL, and rollouts by what was said in them."""

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import duckdb
import pyarrow.parquet as pq
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ratchet.adapters.errors import UserError, counted
from ratchet.adapters.process.terminal import hanging, on_one_line, terminal_width, visible
from ratchet.tasks.recording.transcripts import describe_end
from ratchet.tasks.recording.views import SPAN_VIEWS, VIEWS, open_views, views_in
from ratchet.tasks.storage.run_folder import RunFolder
from ratchet.tasks.storage.tables import query_beside

FIND_QUERY = query_beside(__file__, "finding")

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


LONGEST_SHOWN = 400
"""Letters of a question or an answer that are shown, around what is sought if it is there."""


@dataclass(frozen=True)
class Sought:
    """Rollouts that are sought: each mark that is given must fit, in capitals or not.

    The `text` stands in a question, an answer or the example, the `error` in its name or message;
    `tool` is the whole name of one that was called; `least` and `most` bound the reward.
    """

    text: str = ""
    error: str = ""
    tool: str = ""
    least: float | None = None
    most: float | None = None


def read_range(text: str) -> tuple[float | None, float | None]:
    """Read the least and the greatest reward of `0.2..0.8`, `..0`, `1..`, a number, or nothing."""
    least, dots, most = text.partition("..")
    try:
        bounds = [float(bound) if bound else None for bound in (least, most if dots else least)]
    except ValueError as error:
        raise UserError(
            f"{text!r} is no reward and no range of rewards; give one such as 0.2..0.8, ..0 or 1"
        ) from error
    return bounds[0], bounds[1]


def describe_found(runs: Sequence[RunFolder], sought: Sought, first: int) -> str:
    """Show what was said in the `first` rollouts that fit, and count the others."""
    with open_views(runs, SPAN_VIEWS) as views:
        found = views.sql(FIND_QUERY, params=asdict(sought)).to_arrow_table().to_pylist()
    shown = ["\n".join(_lines(row, sought.text)) for row in found[:first]]
    left = len(found) - len(shown)
    end = f"{counted(left, 'more rollout')}; --first {len(found)} shows all" if left > 0 else ""
    return "\n\n".join([*shown, *filter(None, [end])])


def _lines(row: Mapping[str, Any], text: str) -> Iterator[str]:
    """Yield the lines of a rollout: its name and its end, and each question with its answer."""
    yield hanging(f"{row['run']} {row['rollout_id']}, {describe_end(row)}")
    for turn in row["turns"] or ():
        yield hanging(f"{turn['role']} was asked: {_around(turn['asked'] or '', text)}")
        yield hanging(f"{turn['role']} answered: {_around(turn['said'], text)}")


def _around(words: str, text: str) -> str:
    """Return the words around a text, or if they lack it their beginning."""
    if len(words) <= LONGEST_SHOWN:
        return words
    at = max(words.lower().find(text.lower()), 0)
    start = max(0, min(at - LONGEST_SHOWN // 2, len(words) - LONGEST_SHOWN))
    cut = words[start : start + LONGEST_SHOWN]
    return f"{'… ' if start else ''}{cut}{' …' if start + LONGEST_SHOWN < len(words) else ''}"
