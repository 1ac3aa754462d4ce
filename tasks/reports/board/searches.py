"""What a run has played, as an address of the board asks for it: rollouts, groups, examples.

Each value of an address is checked before it is used.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self
from urllib.parse import urlencode

from pydantic import BaseModel, ConfigDict, Field

from ratchet.adapters.calls import POLICY
from ratchet.adapters.door.roles import answerers, policy_of
from ratchet.adapters.tinker.bases import Decode
from ratchet.tasks.recording.views import Views, open_views
from ratchet.tasks.reports.rollouts import MarkedTrajectory, mark_trajectories
from ratchet.tasks.storage.manifest import recipe_of
from ratchet.tasks.storage.names import BatchName, is_judging, parse_batch, parse_rollout
from ratchet.tasks.storage.run_folder import TRAINED_SPLITS, RunError, RunFolder
from ratchet.tasks.storage.tables import query_beside

ROLLOUTS_QUERY, GROUPS_QUERY, CALLS_QUERY, EXAMPLES_QUERY = (
    query_beside(__file__, name) for name in ("rollouts", "groups", "calls", "examples")
)

PAGE_ROWS = 50
"""Rows of a page."""
CELL_LETTERS, EXAMPLE_LETTERS, TEXT_LETTERS = 300, 2000, 20_000
"""Letters of a text that are shown in a table, of a held-out example, and of a text by itself."""
MOST_CALLS = 200
"""Calls of a rollout that are shown."""

ViewRow = Mapping[str, Any]


class FromQuery(BaseModel):
    """Values of a page's query, whose names and bounds are the fields'; others are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    page: int = Field(default=1, ge=1, le=10**6)
    live: Literal["on", "off"] = "on"

    @property
    def skipped(self) -> int:
        """Rows before the page that is asked for."""
        return PAGE_ROWS * (self.page - 1)

    @classmethod
    def read(cls, pairs: list[tuple[str, str]]) -> Self:
        """Read the pairs of a query: a name's last value or, for a list, all that are not empty."""
        given: dict[str, list[str]] = defaultdict(list)
        for name, text in pairs:
            if text:
                given[name].append(text)
        lists = {name for name, field in cls.model_fields.items() if field.annotation == list[str]}
        values = {name: texts if name in lists else texts[-1] for name, texts in given.items()}
        return cls.model_validate(values)

    def query(self, **changes: object) -> str:
        """Return the query of the same page with some values changed; defaults are left out."""
        values = self.model_copy(update=changes).model_dump(exclude_defaults=True)
        return f"?{urlencode(values, doseq=True)}"


class PlayedSearch(FromQuery):
    """Search of what was played in a split and a step; None is any."""

    split: str | None = Field(default=None, max_length=200)
    step: int | None = Field(default=None, ge=0, le=10**9)

    def played(self, batch: BatchName) -> bool:
        """Return whether something of a batch can fit."""
        return self.split in (None, batch.split) and self.step in (None, batch.step)


class RolloutSearch(PlayedSearch):
    """Search of rollouts; a bound of None is no bound."""

    ended: Literal["rewarded", "ended", "failed", "under way"] | None = None
    at_least: float | None = Field(default=None, allow_inf_nan=False)
    at_most: float | None = Field(default=None, allow_inf_nan=False)
    shortest: int | None = Field(default=None, ge=0, le=10**12)
    longest: int | None = Field(default=None, ge=0, le=10**12)
    error: str | None = Field(default=None, max_length=1000)
    said: str | None = Field(default=None, max_length=1000)
    order: Literal["lowest", "highest", "shortest", "longest"] | None = None


class GroupSearch(PlayedSearch):
    """Search of groups."""

    rewards: Literal["equal", "different", "none"] | None = None


class Sides(FromQuery):
    """Rollouts of a group that are shown beside each other; the second may be missing."""

    left: str | None = Field(default=None, max_length=300)
    right: str | None = Field(default=None, max_length=300)


class ExampleSearch(FromQuery):
    """Search of held-out examples: by split, by two checkpoints, and by how they changed."""

    split: str | None = Field(default=None, max_length=200)
    before: int | None = Field(default=None, ge=0, le=10**9)
    after: int | None = Field(default=None, ge=0, le=10**9)
    change: Literal["better", "worse", "equal"] | None = None


@dataclass(frozen=True)
class ShownRollout:
    """Rollout in full: its row of the search, its tokens, and the calls without tokens."""

    row: ViewRow
    trajectories: Sequence[MarkedTrajectory]
    calls: Sequence[ViewRow]


def search_rollouts(run: RunFolder, search: RolloutSearch) -> list[ViewRow]:
    """Return a page of the rollouts that fit; each has the number of all as `found`."""
    with open_views([run], ["rollouts"], search.played) as views:
        return _search(views, search, letters=CELL_LETTERS, most=PAGE_ROWS)


def search_groups(run: RunFolder, search: GroupSearch) -> list[ViewRow]:
    """Return a page of the groups that fit; each has the number of all as `found`."""
    with open_views([run], ["groups"], search.played) as views:
        found = {"letters": CELL_LETTERS, "most": PAGE_ROWS, "skipped": search.skipped}
        values = {name: getattr(search, name) for name in ("split", "step", "rewards")}
        return _rows(views, GROUPS_QUERY, {**values, **found})


def list_splits(run: RunFolder) -> list[str]:
    return sorted({parse_batch(name).split for name in run.sealed_batches() | run.begun_batches()})


def read_group(
    run: RunFolder, group: str, sides: Sides, decode: Decode | None
) -> tuple[list[ViewRow], list[ShownRollout]]:
    """Return the rollouts of a group, and the rollouts in full that are asked for.

    By default these have the highest and the lowest reward. RunError if there is no group.
    """
    try:
        shard = parse_rollout(f"{group}-00").shard
    except ValueError as error:
        raise RunError(
            f"{group!r} names no group; the page of the run's groups has them"
        ) from error
    with open_views([run], ["rollouts", "calls"], lambda batch: batch.shard == shard) as views:
        search = RolloutSearch(order="highest")
        rows = _search(views, search, letters=TEXT_LETTERS, most=MOST_CALLS, group=group)
        if not rows:
            raise RunError(f"{run.name} has no group {group!r}; the page of its groups has them")
        by_name = {row["rollout_id"]: row for row in rows}
        asked = [by_name[name] for name in (sides.left, sides.right) if name in by_name]
        return rows, [_show(run, views, row, decode) for row in asked or [rows[0], *rows[1:][-1:]]]


def played_examples(run: RunFolder) -> dict[str, list[int]]:
    """Map each held-out split to the checkpoints that played some of it."""
    names = [*map(parse_batch, run.sealed_batches() | run.begun_batches())]
    splits = {name.split for name in names if not is_judging(name.split)} - {*TRAINED_SPLITS}
    ordered = sorted(splits, key=lambda split: (split != "test", split))
    return {
        split: sorted({name.step for name in names if name.split == split}) for split in ordered
    }


def choose_checkpoints(search: ExampleSearch, played: dict[str, list[int]]) -> ExampleSearch:
    """Return the search with the first split, its first and its last checkpoint as defaults."""
    split = search.split if search.split in played else next(iter(played))
    steps = played[split]
    before = steps[0] if search.before is None else search.before
    after = steps[-1] if search.after is None else search.after
    return search.model_copy(update={"split": split, "before": before, "after": after})


def compare_examples(run: RunFolder, search: ExampleSearch) -> list[ViewRow]:
    """Return a page of the examples that fit; each has the number of all as `found`."""
    steps = (search.before, search.after)
    with open_views(
        [run],
        ["rollouts", "calls"],
        lambda batch: batch.split == search.split and batch.step in steps,
    ) as views:
        values = {"before": search.before, "after": search.after, "change": search.change}
        shown = {"letters": EXAMPLE_LETTERS, "most": PAGE_ROWS, "skipped": search.skipped}
        roles = answerers(recipe_of(run).get("roles", {}))
        trained = [POLICY, *(role for role, who in roles.items() if policy_of(who))]
        return _rows(views, EXAMPLES_QUERY, {**values, **shown, "roles": trained})


def _show(run: RunFolder, views: Views, row: ViewRow, decode: Decode | None) -> ShownRollout:
    name, trained = row["rollout_id"], row["split"] in TRAINED_SPLITS
    marked = mark_trajectories(run, row["step"], decode, [name]) if trained else {}
    trajectories = marked.get(name, [])
    told = {one.role for one in trajectories}
    values = {"rollout": name, "attempt": row["attempt"], "told": [*told]}
    calls = _rows(views, CALLS_QUERY, {**values, "letters": TEXT_LETTERS, "most": MOST_CALLS})
    return ShownRollout(row, trajectories, calls)


def _search(
    views: Views, search: RolloutSearch, letters: int, most: int, group: str | None = None
) -> list[ViewRow]:
    values = search.model_dump(exclude={"page", "live"})
    paged = {"letters": letters, "most": most, "skipped": search.skipped}
    return _rows(views, ROLLOUTS_QUERY, {**values, **paged, "group": group})


def _rows(views: Views, query: str, values: Mapping[str, object]) -> list[ViewRow]:
    return views.sql(query, params=dict(values)).to_arrow_table().to_pylist()
