"""The view `tokens`: each token of a run's trajectories, with its text."""

from collections.abc import Iterator, Sequence

import duckdb
import pyarrow as pa

from adapters.tinker.token_texts import find_token_texts
from tasks.storage.manifest import recipe_of
from tasks.storage.run_folder import RunFolder
from tasks.storage.tables import query_beside

QUERY = query_beside(__file__)
FOUND = "select run, list_distinct(flatten(list(tokens))) from trajectories group by run"
TEXTS = pa.schema([("run", pa.string()), ("token", pa.int32()), ("text", pa.string())])


def add_tokens(connection: "duckdb.DuckDBPyConnection", runs: Sequence[RunFolder]) -> None:
    """Add the view `tokens` to the views `trajectories` and `datums` of runs.

    Texts come from the tokenizers that are on this machine; without a run's, its texts are null.
    """
    tokens = dict(connection.execute(FOUND).fetchall())
    rows = [row for run in runs for row in _texts(run, tokens.get(run.name, ()))]
    connection.register("token_texts", pa.Table.from_pylist(rows, schema=TEXTS))
    connection.execute(QUERY)


def _texts(run: RunFolder, tokens: Sequence[int]) -> Iterator[dict[str, str | int]]:
    text_of = find_token_texts(recipe_of(run)["model"]["base"]) if tokens else None
    if text_of is not None:
        for token in tokens:
            yield {"run": run.name, "token": token, "text": text_of(token)}
