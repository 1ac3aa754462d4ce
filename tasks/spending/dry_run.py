"""What a dry run of one step has taken: tokens of each group, of the update, and seconds."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from tasks.recording.views import open_views
from tasks.spending.ledger import PURPOSES, SpentTokens, read_ledger
from tasks.storage.files import is_written, read_json
from tasks.storage.run_folder import RunFolder
from tasks.storage.tables import arrays, query_beside, read_table

QUERY = query_beside(__file__)
SECONDS_QUERY = """
select split_of(group_id) as split, step, epoch(max(ended) - min(started)) as seconds
from spans group by all
"""
OF_CALLS = {*PURPOSES.values(), "evaluation"}
"""Purposes of a ledger whose tokens are those of calls."""


@dataclass(frozen=True)
class Trained:
    """Tokens of a step's rollouts for one policy, by group: all, and those that were trained.

    `expert` counts those of the texts that are trained beside them.
    """

    all: Sequence[int]
    kept: Sequence[int]
    expert: int


class DrySpending:
    """Files of a dry run of one step, between two evaluations."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    @cached_property
    def calls(self) -> dict[tuple[str, str, bool], list[dict[str, Any]]]:
        """The groups' calls by split, role, and whether the Tinker service has answered them."""
        with open_views([self._folder], ("spans",)) as views:
            rows = views.sql(QUERY).to_arrow_table().to_pylist()
        by = ("split", "role", "ours")
        rows.sort(key=lambda row: tuple(row[name] for name in by))
        found = groupby(rows, key=lambda row: (row["split"], row["role"], row["ours"]))
        return {key: [*group] for key, group in found}

    @cached_property
    def seconds(self) -> dict[tuple[str, int], float]:
        """The seconds that the rollouts of a split and step took together."""
        with open_views([self._folder], ("spans",)) as views:
            return {
                (split, step): taken for split, step, taken in views.sql(SECONDS_QUERY).fetchall()
            }

    def work(self) -> list[SpentTokens]:
        """List what was computed beside calls: references, teachers and updates."""
        return [row for row in read_ledger(self._folder).rows if row.purpose not in OF_CALLS]

    def trained(self, policy: str) -> Trained:
        """Count what the update of a policy was made of."""
        groups = _lengths(self._folder.trajectories(policy, 0), less=1)
        kept = _lengths(self._folder.datums(policy, 0))
        expert = self._folder.expert(policy, 0)
        beside = sum(_lengths(expert).values()) if is_written(expert) else 0
        return Trained([*groups.values()], [kept.get(name, 0) for name in groups], beside)

    def seconds_of_update(self, policy: str) -> float:
        return read_json(self._folder.update(policy, 0)).get("seconds/training", 0.0)


def _lengths(path: Path, less: int = 0) -> Mapping[str, int]:
    """Sum the tokens of each group, of the rows that have one to train."""
    table = read_table(path, ["group_id", "tokens", "mask"])
    lengths: dict[str, int] = defaultdict(int)
    columns = (table["group_id"].to_pylist(), *map(arrays, (table["tokens"], table["mask"])))
    for group, tokens, mask in zip(*columns, strict=True):
        lengths[group] += len(tokens) - less if mask.any() else 0
    return lengths
