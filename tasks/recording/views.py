"""Views over the files of runs, for questions in SQL that read nothing else and write nothing."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from operator import and_
from pathlib import Path
from typing import Any, TypeAlias

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow.fs import LocalFileSystem

from ratchet.adapters.errors import UserError
from ratchet.adapters.tinker.bases import find_decoder
from ratchet.tasks.recording.journal import SPAN_SCHEMA, read_spans
from ratchet.tasks.recording.step_log import read_metrics
from ratchet.tasks.storage.files import query_beside, read_json, verified
from ratchet.tasks.storage.manifest import compared_files, recipe_of
from ratchet.tasks.storage.names import BatchName, parse_batch
from ratchet.tasks.storage.run_folder import RunFolder
from ratchet.tasks.storage.tables import PRELUDE

TOKENS_QUERY = query_beside(__file__, "tokens")
DISTINCT_TOKENS = "select run, list_distinct(flatten(list(tokens))) from trajectories group by run"
TOKEN_TEXTS = pa.schema([("run", pa.string()), ("token", pa.int32()), ("text", pa.string())])

QUERY = query_beside(__file__)

SPAN_VIEWS = ("spans", "calls", "rollouts", "groups", "failures")
LEARNED_VIEWS = ("trajectories", "verdicts", "datums", "expert")
GIVEN_VIEWS = ("texts", "text_teachers", "expert_texts", "pairs", "pair_references")
"""Views of what a run learns and has not played: each shows a file or a folder."""
VIEWS = (*SPAN_VIEWS, *LEARNED_VIEWS, "tokens", "steps", "evaluations", "comparisons", *GIVEN_VIEWS)

EVALUATIONS = pa.schema(
    [
        ("run", pa.string()),
        ("step", pa.int32()),
        ("evaluation", pa.string()),
        ("played", pa.string()),
        ("category", pa.string()),
        ("rollouts", pa.int32()),
        ("failed", pa.int32()),
        ("examples", pa.int32()),
        ("reward", pa.float64()),
        ("standard_error", pa.float64()),
        ("lower", pa.float64()),
        ("upper", pa.float64()),
        ("reward_failed_as_zero", pa.float64()),
        ("pass_at", pa.map_(pa.int32(), pa.float64())),
    ]
)
"""Columns of the view `evaluations`: a row for each way of sampling and each category."""

COMPARISONS = pa.schema(
    [
        ("target", pa.string()),
        ("run", pa.string()),
        ("step", pa.int32()),
        ("example_id", pa.int64()),
        ("example", pa.string()),
        ("rollouts", pa.int64()),
        ("failed", pa.int64()),
        ("reward", pa.float64()),
        ("tokens", pa.float64()),
        ("cost", pa.float64()),
        ("question", pa.string()),
        ("answer", pa.string()),
        ("calls", pa.list_(pa.struct([("asked", pa.string()), ("said", pa.string())]))),
    ]
)
"""Columns of the table of a comparison: a row for each example and each target."""

Views: TypeAlias = "duckdb.DuckDBPyConnection"
"""Connection with views over runs.

The type is text at run time: at the end of a process DuckDB complains on standard error about each
of its types that a thread still refers to, and Prefect's threads refer to all that a flow imports.
"""

UNREADABLE = (UserError, OSError, ValueError, duckdb.Error)
"""Errors of a run whose files cannot be shown; pyarrow's are ValueErrors too."""

LOCKS = """
set enable_external_access = false;
set python_enable_replacements = false;
set lock_configuration = true;
"""


def open_views(
    runs: Sequence[RunFolder],
    names: Sequence[str] = VIEWS,
    played: Callable[[BatchName], bool] = lambda _: True,
) -> Views:
    """Open a connection with the named views over runs: all that they have recorded until now.

    Every file is checked first, and a damaged one is refused (Damaged). The torn end of a journal
    does not count; a call that is being answered shows as begun. The connection opens no file and
    loads no extension. Close the connection, or use it in a `with`.

    Steps, trajectories, datums and the GIVEN_VIEWS have the columns of their files. Without a file
    there is no such view, and no view `tokens`. The views of spans have the batches for which
    `played` is true; no file of another batch is read.
    """
    connection = duckdb.connect()
    connection.execute(LOCKS)
    if {*names} & {*SPAN_VIEWS}:
        _register_spans(connection, runs, played)
        connection.execute(PRELUDE + QUERY)
    learned = {
        name: dict(_learned(runs, name)) for name in LEARNED_VIEWS if {name, "tokens"} & {*names}
    }
    for name, files in learned.items():
        if files:
            connection.register(name, scan_tables(files))
    if "tokens" in names and learned["trajectories"] and learned["datums"]:
        add_tokens(connection, runs)
    _register_rows(connection, runs, names)
    for name in {*GIVEN_VIEWS} & {*names}:
        given = ((run, path) for run in runs for path in run.bound_files())
        files = [
            (run, path)
            for run, path in given
            if name == path.relative_to(run.path).parts[0].partition(".")[0]
        ]
        if files:
            connection.register(name, scan_tables({path: {"run": run.name} for run, path in files}))
    return connection


def views_in(statement: str) -> list[str]:
    """List the views that a statement may read: the views that it names, or all of them."""
    words = {word.lower() for word in re.findall(r"\w+", statement)}
    return [name for name in VIEWS if name in words] or [*VIEWS]


def _register_spans(
    connection: Views, runs: Sequence[RunFolder], played: Callable[[BatchName], bool]
) -> None:
    files: dict[Path, Mapping[str, str]] = {}
    tables = [_named(SPAN_SCHEMA.empty_table(), "", "")]
    for run in runs:
        sealed, journals = run.all_spans()
        files |= {
            path: {"run": run.name, "batch": path.stem}
            for path in sealed
            if played(parse_batch(path.stem))
        }
        tables += [
            _named(read_spans(path), run.name, path.stem)
            for path in journals
            if played(parse_batch(path.stem))
        ]
    connection.register("journalled", pa.concat_tables(tables))
    connection.register("sealed", scan_tables(files, SPAN_SCHEMA) if files else tables[0])


def _register_rows(connection: Views, runs: Sequence[RunFolder], names: Sequence[str]) -> None:
    """Register the tables of steps, evaluations and comparisons; comparisons belong to no run."""
    if "steps" in names:
        rows = [{"run": run.name, **row} for run in runs for row in read_metrics(run.metrics)]
        columns = dict.fromkeys(name for row in rows for name in row)
        table = pa.table({name: pa.array([row.get(name) for row in rows]) for name in columns})
        if rows:
            connection.register("steps", table)
    if "evaluations" in names:
        rows = [row for run in runs for row in evaluation_rows(run)]
        connection.register("evaluations", pa.Table.from_pylist(rows, schema=EVALUATIONS))
    if "comparisons" in names:
        compared = {path: {"comparison": path.parent.name} for path in compared_files()}
        table = scan_tables(compared, COMPARISONS) if compared else COMPARISONS.empty_table()
        connection.register("comparisons", table)


def _named(spans: pa.Table, run: str, batch: str) -> pa.Table:
    for column, value in (("batch", batch), ("run", run)):
        spans = spans.add_column(0, column, pa.array([value] * len(spans), pa.string()))
    return spans


def _learned(
    runs: Sequence[RunFolder], name: str
) -> Iterator[tuple[Path, Mapping[str, str | int]]]:
    """Yield the files of trajectories or datums, with the run, policy and step of their rows."""
    for run in runs:
        for policy in run.policies():
            for path in run.learned(policy, name):
                yield path, {"run": run.name, "policy": policy, "step": int(path.stem)}


def evaluation_rows(run: RunFolder) -> Iterator[dict[str, Any]]:
    """Yield the rows of a run in the view `evaluations`, in the order of checkpoints."""
    for path in run.evaluations():
        for how, whole in read_json(path).items():
            for category, score in {"all": whole, **whole["categories"]}.items():
                finished, as_zero = score["finished"], score["failed_as_zero"]
                lower, upper = finished["interval"] or (None, None)
                yield {
                    "run": run.name,
                    "step": int(path.name.split(".")[0]),
                    "evaluation": path.stem,
                    "played": how,
                    "category": category,
                    "rollouts": score["rollouts"],
                    "failed": score["failed"],
                    "examples": finished["examples"],
                    "reward": finished["mean"],
                    "standard_error": finished["standard_error"],
                    "lower": lower,
                    "upper": upper,
                    "reward_failed_as_zero": as_zero["mean"],
                    "pass_at": [(int(k), value) for k, value in as_zero["pass_at"].items()],
                }


def add_tokens(connection: "duckdb.DuckDBPyConnection", runs: Sequence[RunFolder]) -> None:
    """Add the view `tokens` to the views `trajectories` and `datums` of runs.

    Texts come from the tokenizers that are on this machine; without a run's, its texts are null.
    """
    tokens = dict(connection.execute(DISTINCT_TOKENS).fetchall())
    rows = [row for run in runs for row in _texts(run, tokens.get(run.name, ()))]
    connection.register("token_texts", pa.Table.from_pylist(rows, schema=TOKEN_TEXTS))
    connection.execute(TOKENS_QUERY)


def _texts(run: RunFolder, tokens: Sequence[int]) -> Iterator[dict[str, str | int]]:
    decode = find_decoder(recipe_of(run)["model"]["base"]) if tokens else None
    if decode is not None:
        for token in tokens:
            yield {"run": run.name, "token": token, "text": decode([token])}


def scan_tables(
    files: Mapping[Path, Mapping[str, str | int]], schema: pa.Schema | None = None
) -> ds.Dataset:
    """Open tables of storage as one dataset; Damaged if a file has changed since.

    The rows of a file have, before the columns of the `schema` (of the first file if None), the
    constants that are given with it. There must be a file.
    """
    paths = [verified(path) for path in files]
    constants = [*files.values()]
    own = pq.read_schema(paths[0]) if schema is None else schema
    named = [pa.field(name, pa.scalar(value).type) for name, value in constants[0].items()]
    return ds.FileSystemDataset.from_paths(
        [str(path) for path in paths],
        schema=pa.schema([*named, *own]),
        format=ds.ParquetFileFormat(),
        filesystem=LocalFileSystem(),
        partitions=[
            reduce(and_, (ds.field(name) == value for name, value in of_file.items()))
            for of_file in constants
        ],
    )
