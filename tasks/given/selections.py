"""Selections of earlier runs' rollouts, by a query → texts or pairs of the tokens as sampled."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import ClassVar, Self

import duckdb
import pyarrow as pa

from ratchet.adapters.rendering.chat import Chat
from ratchet.tasks.examples.reading import DatasetError
from ratchet.tasks.given.conversations import WeightedTokens
from ratchet.tasks.given.given import Read, Unit
from ratchet.tasks.given.pairs import pair_of
from ratchet.tasks.recording.views import open_views
from ratchet.tasks.settings.given import Origin
from ratchet.tasks.storage.manifest import recipe_of
from ratchet.tasks.storage.run_folder import RunFolder, folder_of
from ratchet.tasks.storage.tables import arrays

ROLLOUTS = """
with chosen as (select distinct run, rollout_id from ({query}))
select run, rollout_id, tokens, mask
from trajectories join chosen using (run, rollout_id)
where policy = 'policy'
order by run, rollout_id, first_call
"""


CHOSEN_PAIRS_QUERY = """
with
given as (
    select
        null::varchar as chosen,
        null::varchar as rejected,
        null::varchar as rollout_id,
        null::boolean as label
    where false
    union all by name
    select * from ({query})
),
asked as (
    select distinct
        run,
        coalesce(chosen, case when label then rollout_id end) as chosen,
        coalesce(rejected, case when not label then rollout_id end) as rejected
    from given
),
compared as (
    select
        asked.*,
        chosen is null or rejected is null or one.group_id = other.group_id as comparable
    from asked
    left join rollouts as one on one.run = asked.run and one.rollout_id = asked.chosen
    left join rollouts as other on other.run = asked.run and other.rollout_id = asked.rejected
)
select
    compared.run,
    compared.chosen,
    compared.rejected,
    coalesce(comparable, false) as comparable,
    case when rollout_id is not null then coalesce(rollout_id = compared.chosen, false) end
        as preferred,
    tokens,
    mask
from compared
left join trajectories
    on trajectories.run = compared.run
    and rollout_id in (compared.chosen, compared.rejected)
    and policy = 'policy'
order by compared.run, compared.chosen, compared.rejected, preferred, first_call
"""


@dataclass(frozen=True)
class RolloutQuery:
    """A query over the views of earlier runs, which chooses rollouts.

    The runs trained models of the `base`: another base has other tokens.
    """

    runs: tuple[RunFolder, ...]
    key: str
    """Key of the recipe that has the query."""
    query: str
    base: str

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
                f"{self.key} chooses nothing among {self.name} that trained something; try it by "
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


def queries_of(origin: Origin, base: str, where: str) -> dict[str, RolloutQuery]:
    """Map each split to its query, if the splits are chosen from runs of models of `base`.

    `where` has the recipe's keys of the queries.
    """
    runs = tuple(folder_of(name) for name in origin.runs)
    return {
        split: RolloutQuery(runs, f"{where}.{key}", query, base)
        for split, (key, query) in origin.asked().items()
        if query is not None
    }


@dataclass(frozen=True)
class Chosen(ABC):
    """Units of rollouts that a query chooses, numbered in the order of their runs and names.

    Their tokens are taken from the main policy's trajectories; nothing is rendered again.
    """

    query: RolloutQuery
    apart: tuple[Self, ...] = ()
    """What is trained, if these are held out: no rollout may be both."""

    template: ClassVar[str]
    columns: ClassVar[str]
    key: ClassVar[tuple[str, ...]]
    """Columns that name a unit: its run, and the rollouts of it."""

    @property
    def name(self) -> str:
        return self.query.name

    def __len__(self) -> int:
        return len(self._units)

    def units(self, chat: Chat) -> Iterator[tuple[int, Read]]:
        yield from enumerate(self._units)

    @abstractmethod
    def unit(self, rows: pa.Table) -> Read:
        """Return the unit of its rows."""

    @cached_property
    def _names(self) -> list[tuple[str, ...]]:
        """List the run of each row, and the rollouts of its unit."""
        return [*zip(*(self._table[name].to_pylist() for name in self.key), strict=True)]

    @cached_property
    def _rollouts(self) -> set[tuple[str, str]]:
        return {(run, one) for run, *chosen in self._names for one in chosen if one}

    @cached_property
    def _table(self) -> pa.Table:
        return self.query.ask(self.template, self.columns)

    @cached_property
    def _units(self) -> list[Read]:
        for trained in self.apart:
            self.query.refuse_both(self._rollouts, trained.query, trained._rollouts)
        places = groupby(range(len(self._names)), lambda row: self._names[row])
        units = ([*own] for _, own in places)
        return [self.unit(self._table.slice(own[0], len(own))) for own in units]


class ChosenRollouts(Chosen):
    """Texts: rollouts that a query chooses by its columns `run` and `rollout_id`.

    What was sampled is trained.
    """

    template = ROLLOUTS
    columns = "run and rollout_id"
    key = ("run", "rollout_id")

    def unit(self, rows: pa.Table) -> Unit:
        return Unit({"": _sequences(rows)})


class ChosenPairs(Chosen):
    """Pairs of rollouts that a query chooses by its columns `run`, `chosen` and `rejected`.

    Both belong to one group: only rollouts of a group answer the same question. With `rollout_id`
    and `label` instead, the rollouts are labelled answers.
    """

    template = CHOSEN_PAIRS_QUERY
    columns = "run, chosen and rejected, or run, rollout_id and label"
    key = ("run", "chosen", "rejected")

    def unit(self, rows: pa.Table) -> Read:
        run, chosen, rejected = (rows[name][0].as_py() for name in self.key)
        if not rows["comparable"][0].as_py():
            raise DatasetError(
                f"{chosen} and {rejected} of {run} are no two rollouts of one group; join the view "
                "rollouts with itself on run and group_id"
            )
        if chosen is None and rejected is None:
            return "without a label"
        preferred = rows["preferred"].to_pylist()
        if None in preferred:
            return "broken"
        sides: dict[bool, list[WeightedTokens]] = {True: [], False: []}
        for side, sequence in zip(preferred, _sequences(rows), strict=True):
            if any(sequence.weights):
                sides[side].append(sequence)
        labelled = chosen is None or rejected is None
        return pair_of(sides[True], sides[False], labelled=labelled)


def _sequences(rows: pa.Table) -> list[WeightedTokens]:
    return [
        WeightedTokens(tokens.tolist(), mask.astype(float).tolist())
        for tokens, mask in zip(arrays(rows["tokens"]), arrays(rows["mask"]), strict=True)
    ]
