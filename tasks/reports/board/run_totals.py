"""A run → its totals, of which the files are read that have changed."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import fsum
from pathlib import Path

from adapters.errors import UserError
from tasks.checkpoints import read_held_out
from tasks.recording.step_log import COST, spent_seconds
from tasks.recording.views import UNREADABLE
from tasks.reports.curves import read_metric_curves
from tasks.storage.checksums import Damaged
from tasks.storage.files import FileVersions, version_of
from tasks.storage.keys import Json, flatten
from tasks.storage.manifest import describe_parent, read_manifest
from tasks.storage.run_folder import NAME, RunFolder, all_runs

MOST_RUNS = 10_000
"""Runs whose rows are kept in memory."""

BROKEN = (*UNREADABLE, KeyError, TypeError, RecursionError)
"""Errors of a run of which somebody has written a file by hand, too."""

Keys = Mapping[str, Json]
"""Key of a recipe → its value."""


@dataclass(frozen=True)
class BoundRun:
    """Run by its manifest alone. One that cannot be read has only its `trouble`."""

    folder: RunFolder
    agent: str = ""
    created: str = ""
    keys: Keys | None = None
    parent: str = ""
    trouble: str = ""

    @property
    def is_named(self) -> bool:
        """True if commands, and addresses of the board, can name the run."""
        return NAME.fullmatch(self.folder.name) is not None

    def has(self, key: str, value: str) -> bool:
        """Return whether a key of the recipe has a value, as it is shown."""
        return self.keys is not None and key in self.keys and show(self.keys[key]) == value


@dataclass(frozen=True)
class RunTotals:
    """Totals of a run: its steps, its last reward, its tokens.

    `measured` is the first and the last held-out value in words, of whatever the run measures.
    `cost` is in US dollars, that of the roles that no policy answers; None if no price is known.
    `seconds` are those of sampling and training, and no duration with a lag.
    """

    done: int
    reward: float | None
    measured: str
    tokens: float
    cost: float | None
    seconds: float
    failed: int


def list_bound_runs() -> list[BoundRun]:
    """List all runs, the newest first, and then those that cannot be read."""
    runs = [_read_bound(run, version_of([run.manifest])) for run in all_runs()]
    return sorted(runs, key=lambda run: run.created, reverse=True)


def read_totals(run: BoundRun) -> RunTotals:
    """Return what a run has done, read anew only if its files have changed."""
    folder = run.folder
    return _read_totals(folder, version_of([folder.metrics, evaluations_folder(folder)]))


def evaluations_folder(run: RunFolder) -> Path:
    """Return the folder that changes when an evaluation is written."""
    return run.evaluation("any").parent


def show(value: Json) -> str:
    """Write a value of a recipe as the board shows it, and as it is asked for."""
    return value if isinstance(value, str) else "–" if value is None else str(value)


def kind_of(error: Exception) -> str:
    """Say in a word what an error makes of a run."""
    return "damaged" if isinstance(error, Damaged) else "unreadable"


def explain(error: Exception) -> str:
    """Say why a run cannot be shown."""
    known = isinstance(error, UserError)
    return str(error) if known else f"{type(error).__name__}: {error}"


@lru_cache(MOST_RUNS)
def _read_bound(run: RunFolder, _version: FileVersions) -> BoundRun:
    try:
        manifest = read_manifest(run)
        recipe = manifest["recipe"]
        agent = recipe.get("agent") or recipe["flow"]
        parent = describe_parent(manifest)
        return BoundRun(run, str(agent), str(manifest["created"]), flatten(recipe), parent)
    except BROKEN as error:
        return BoundRun(run, trouble=explain(error))


@lru_cache(MOST_RUNS)
def _read_totals(run: RunFolder, _version: FileVersions) -> RunTotals:
    curves = read_metric_curves(run)
    costs = [row[key] for row in curves.metrics for key in row if key.startswith(COST)]
    return RunTotals(
        done=len(curves.metrics),
        reward=curves.metrics[-1].get("reward/mean") if curves.metrics else None,
        measured=str(read_held_out(run)),
        tokens=curves.tokens[-1],
        cost=fsum(costs) if costs else None,
        seconds=spent_seconds(curves.metrics),
        failed=sum(int(row.get("rollouts/failed", 0)) for row in curves.metrics),
    )
