"""A run → what Prefect's UI shows of it: progress, and then its metrics and transcripts."""

import re
from pathlib import Path
from uuid import UUID

from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

from tasks.metrics import Metrics, read_metrics
from tasks.reports.reports import METRICS, transcripts


class Progress:
    """A bar in the UI that says how far a run is, and what reward it has."""

    def __init__(self, folder: Path, steps: int) -> None:
        self._steps = steps
        self._artifact = create_progress_artifact(
            progress=0.0, key=_key(folder, "progress"), description=f"{folder.name}: starting"
        )

    def show(self, step: int, metrics: Metrics) -> None:
        """Step `step` (from 0) is done."""
        assert isinstance(self._artifact, UUID)
        reward = metrics.get("reward/mean")
        said = "no rollout has a reward" if reward is None else f"reward {reward:+.3f}"
        update_progress_artifact(
            self._artifact,
            progress=100 * (step + 1) / self._steps,
            description=f"step {step + 1} of {self._steps}, {said}",
        )


def publish(folder: Path) -> None:
    """The metrics by step, and three rollouts of the last step: best, middle and worst."""
    metrics = read_metrics(folder / "metrics.jsonl")
    rows = [{name: _short(row.get(name)) for name in ("step", *METRICS)} for row in metrics]
    create_table_artifact(rows, key=_key(folder, "metrics"), description=f"{folder.name}, by step")
    last = max((folder / "spans").glob("train-*.parquet"))
    create_markdown_artifact(transcripts(last), key=_key(folder, "transcripts"))


def _short(value: float | None) -> float | None:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _key(folder: Path, what: str) -> str:
    """Prefect's artifact keys hold lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", f"{folder.name}-{what}".lower()).strip("-")
