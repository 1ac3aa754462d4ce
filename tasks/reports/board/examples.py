"""Held-out examples of a run as two checkpoints played them: rewards and answers."""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from adapters.calls import POLICY
from adapters.door.roles import policy_of
from tasks.recording.views import open_views
from tasks.reports.board.queries import PAGE, FromQuery, skipped
from tasks.storage.manifest import recipe_of
from tasks.storage.names import is_judging, parse_batch
from tasks.storage.run_folder import TRAINED, RunFolder
from tasks.storage.tables import query_beside

QUERY = query_beside(__file__)

LETTERS = 2000
"""Letters of an example and of its answers that are shown."""


class ExampleSearch(FromQuery):
    """Search of held-out examples: by split, by two checkpoints, and by how they changed."""

    split: str | None = Field(default=None, max_length=200)
    before: int | None = Field(default=None, ge=0, le=10**9)
    after: int | None = Field(default=None, ge=0, le=10**9)
    change: Literal["better", "worse", "equal"] | None = None


def played_examples(run: RunFolder) -> dict[str, list[int]]:
    """Map each held-out split to the checkpoints that played some of it."""
    sealed, journals = run.all_spans()
    names = [parse_batch(path.stem) for path in (*sealed, *journals)]
    splits = {name.split for name in names if not is_judging(name.split)} - {*TRAINED}
    ordered = sorted(splits, key=lambda split: split != "test")
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


def compare_examples(run: RunFolder, search: ExampleSearch) -> list[dict[str, Any]]:
    """Return a page of the examples that fit; each has the number of all as `found`."""
    steps = (search.before, search.after)
    with open_views(
        [run],
        ["rollouts", "calls"],
        lambda batch: batch.split == search.split and batch.step in steps,
    ) as views:
        values = {"before": search.before, "after": search.after, "change": search.change}
        shown = {"letters": LETTERS, "most": PAGE, "skipped": skipped(search)}
        parameters = {**values, **shown, "roles": _trained_roles(run)}
        return views.sql(QUERY, params=parameters).to_arrow_table().to_pylist()


def _trained_roles(run: RunFolder) -> Sequence[str]:
    roles = recipe_of(run).get("roles", {})
    return [POLICY, *(role for role, who in roles.items() if policy_of(who))]
