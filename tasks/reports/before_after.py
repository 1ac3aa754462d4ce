"""A run → one example as its first and its last checkpoint played it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.recording.views import Views
from tasks.storage.tables import query_beside

QUERY = query_beside(__file__)
SPLITS = ("test", "train")
"""Splits of which an example is shown, the first that was played at two checkpoints."""

STEPS = """
select min(step), max(step) from rollouts where split = $split and reward is not null
"""


@dataclass(frozen=True)
class PlayedExample:
    """Rollout of an example: the `step` of its shard, its reward, and what was asked and said."""

    step: int
    rollout_id: str
    reward: float
    calls: Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class BeforeAndAfter:
    """Two rollouts, by an early and by a late checkpoint, of the `same` example or of two."""

    split: str
    same: bool
    before: PlayedExample
    after: PlayedExample


def find_before_and_after(views: Views) -> BeforeAndAfter | None:
    """Find a held-out example that two checkpoints played, else rollouts of two training steps."""
    for split in SPLITS:
        [(before, after)] = views.execute(STEPS, {"split": split}).fetchall()
        if before == after:
            continue
        steps = {"split": split, "before": before, "after": after}
        if rows := views.sql(QUERY, params=steps).to_arrow_table().to_pylist():
            row = rows[0]
            sides = _side(row, "before", before), _side(row, "after", after)
            return BeforeAndAfter(split, row["same"], *sides)
    return None


def _side(row: Mapping[str, Any], side: str, step: int) -> PlayedExample:
    values = (row[f"{what}_{side}"] for what in ("rollout", "reward", "calls"))
    return PlayedExample(step, *values)
