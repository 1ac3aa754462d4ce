"""rollouts of earlier runs, chosen by a query → texts: their tokens as they were sampled."""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

import duckdb
import pyarrow as pa

from adapters.rendering.chat import Chat
from tasks.examples.reading import DatasetError
from tasks.recording.views import open_views
from tasks.storage.manifest import recipe_of
from tasks.storage.run_folder import RunFolder
from tasks.storage.tables import arrays
from tasks.texts.rules import Trained
from tasks.texts.tokenizing import WeightedTokens

CHOSEN = """
with chosen as (select distinct run, rollout_id from ({query}))
select run, rollout_id, tokens, mask
from trajectories join chosen using (run, rollout_id)
where policy = 'policy'
order by run, rollout_id, first_call
"""


@dataclass(frozen=True)
class RolloutQuery:
    """A query over the views of earlier runs, which chooses rollouts.

    The runs are of models of the `base`, since another has other tokens.
    """

    runs: tuple[RunFolder, ...]
    key: str
    """Key of the recipe that has the query."""
    query: str
    base: str
    apart: tuple["ChosenRollouts", ...] = ()
    """What is trained, if these are held out: no rollout may be both."""

    @property
    def name(self) -> str:
        return f"the rollouts of {', '.join(run.name for run in self.runs)}"

    def ask(self, template: str, columns: str) -> pa.Table:
        """Return the rows of a template's statement over the query, whose columns are named."""
        for run in self.runs:
            if (other := recipe_of(run)["model"]["base"]) != self.base:
                raise DatasetError(
                    f"{run.path} has tokens of {other}, and the model is {self.base}; name runs of "
                    "that model"
                )
        try:
            with open_views(self.runs) as views:
                table = views.sql(template.format(query=self.query)).to_arrow_table()
        except duckdb.Error as error:
            raise DatasetError(
                f"{self.key} cannot be asked: {error}; give one SELECT over the views of "
                f"docs/sql.md whose columns are {columns}"
            ) from error
        if not table.num_rows:
            raise DatasetError(
                f"{self.key} chooses none of {self.name} that trained something; try it by "
                "`ratchet sql`"
            )
        return table

    def refuse_both(
        self, own: Set[tuple[str, str]], trained: "RolloutQuery", theirs: Set[tuple[str, str]]
    ) -> None:
        """Refuse (DatasetError) rollouts, by run and name, that are trained as well."""
        if both := sorted(own & theirs):
            (run, rollout), others = both[0], len(both) - 1
            more = f", and {others} more" if others else ""
            raise DatasetError(
                f"{self.key} chooses the rollout {rollout} of {run}, which {trained.key} trains"
                f"{more}; let one query leave out what the other chooses"
            )


@dataclass(frozen=True)
class ChosenRollouts:
    """Rollouts that a query chooses by its columns `run` and `rollout_id`.

    Their tokens are those of the main policy's trajectories, and nothing is rendered again.
    """

    query: RolloutQuery
    apart: tuple["ChosenRollouts", ...] = ()
    """What is trained, if these are held out: no rollout may be both."""

    @property
    def name(self) -> str:
        return self.query.name

    def __len__(self) -> int:
        return len(self._groups)

    def sequences(self, chat: Chat, trained: Trained) -> Iterator[tuple[int, list[WeightedTokens]]]:
        """Yield the trajectories of each rollout; what was sampled is trained, whatever `trained`.

        The rollouts are numbered in the order of their runs and names.
        """
        table = self._table
        tokens, masks = arrays(table["tokens"]), arrays(table["mask"])
        for number, rows in enumerate(self._groups):
            yield (
                number,
                [
                    WeightedTokens(tokens[row].tolist(), masks[row].astype(float).tolist())
                    for row in rows
                ],
            )

    @cached_property
    def _groups(self) -> Sequence[Sequence[int]]:
        """List the rows of each rollout."""
        for trained in self.apart:
            self.query.refuse_both({*self._rows}, trained.query, {*trained._rows})
        return [*self._rows.values()]

    @cached_property
    def _rows(self) -> Mapping[tuple[str, str], Sequence[int]]:
        """Map each rollout, by its run and its name, to its rows."""
        rows: dict[tuple[str, str], list[int]] = {}
        names = zip(
            self._table["run"].to_pylist(), self._table["rollout_id"].to_pylist(), strict=True
        )
        for row, name in enumerate(names):
            rows.setdefault(name, []).append(row)
        return rows

    @cached_property
    def _table(self) -> pa.Table:
        return self.query.ask(CHOSEN, "run and rollout_id")
