"""rollouts of earlier runs, two by two or labelled → pairs: their tokens as they were sampled."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import pyarrow as pa

from adapters.rendering.chat import Chat
from tasks.examples.reading import DatasetError
from tasks.pairs.reading import PairSides
from tasks.storage.tables import arrays
from tasks.texts.chosen_rollouts import RolloutQuery
from tasks.texts.tokenizing import WeightedTokens

CHOSEN = """
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
class ChosenPairs:
    """Pairs of rollouts that a query chooses by its columns `run`, `chosen` and `rejected`.

    Both are of one group, since nothing else is asked the same, and nothing is rendered again. With
    `rollout_id` and `label` instead, the rollouts are labelled answers.
    """

    query: RolloutQuery
    apart: tuple["ChosenPairs", ...] = ()
    """What is trained, if these are held out: no rollout may be in both."""

    @property
    def name(self) -> str:
        return self.query.name

    def __len__(self) -> int:
        return len(self._pairs)

    def pairs(self, chat: Chat) -> Iterator[tuple[int, PairSides | str]]:
        """Yield the pairs, numbered in the order of their runs and names."""
        yield from enumerate(self._pairs)

    @cached_property
    def _names(self) -> list[tuple[str, str | None, str | None]]:
        """List the run of each row, and the two rollouts of its pair; one if it is labelled."""
        columns = (self._table[name].to_pylist() for name in ("run", "chosen", "rejected"))
        return [*zip(*columns, strict=True)]

    @cached_property
    def _rollouts(self) -> set[tuple[str, str]]:
        return {(run, one) for run, *pair in self._names for one in pair if one}

    @cached_property
    def _table(self) -> pa.Table:
        columns = "run, chosen and rejected, or run, rollout_id and label"
        return self.query.ask(CHOSEN, columns)

    @cached_property
    def _pairs(self) -> list[PairSides | str]:
        for trained in self.apart:
            self.query.refuse_both(self._rollouts, trained.query, trained._rollouts)
        names = self._names
        return [
            _pair(self._table, [*rows], *pair)
            for pair, rows in groupby(range(len(names)), lambda row: names[row])
        ]


def _pair(
    table: pa.Table, rows: list[int], run: str, chosen: str | None, rejected: str | None
) -> PairSides | str:
    own = table.slice(rows[0], len(rows))
    if not own["comparable"][0].as_py():
        raise DatasetError(
            f"{chosen} and {rejected} of {run} are no two rollouts of one group; join the view "
            "rollouts with itself on run and group_id"
        )
    if chosen is None and rejected is None:
        return "without a label"
    sides: dict[bool, list[WeightedTokens]] = {True: [], False: []}
    columns = own["preferred"].to_pylist(), own["tokens"], own["mask"]
    if None in columns[0]:
        return "broken"
    for preferred, tokens, mask in zip(
        columns[0], arrays(columns[1]), arrays(columns[2]), strict=True
    ):
        if mask.any():
            sides[preferred].append(WeightedTokens(tokens.tolist(), mask.astype(float).tolist()))
    return PairSides(sides[True], sides[False], chosen is None or rejected is None)
