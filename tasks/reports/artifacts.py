"""Artifacts of a run in Prefect's UI: progress, metrics and transcripts."""

import re
from uuid import UUID

from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

from tasks.metrics import Metrics, read_metrics
from tasks.reports.reports import METRICS, transcripts
from tasks.storage.arrivals import batches_of
from tasks.storage.run_folder import RunFolder


class Progress:
    """Progress bar of a run in the UI, with the reward of its last step."""

    def __init__(self, run: RunFolder, steps: int) -> None:
        self._steps = steps
        self._artifact = create_progress_artifact(
            progress=0.0, key=_key(run, "progress"), description=f"{run.name}: starting"
        )

    def show(self, step: int, metrics: Metrics) -> None:
        """Show that step `step` (from 0) is done."""
        assert isinstance(self._artifact, UUID)
        reward = metrics.get("reward/mean")
        said = "no rollout has a reward" if reward is None else f"reward {reward:+.3f}"
        update_progress_artifact(
            self._artifact,
            progress=100 * (step + 1) / self._steps,
            description=f"step {step + 1} of {self._steps}, {said}",
        )


def publish(run: RunFolder) -> None:
    """Publish the metrics by step, and the best, middle and worst rollout of the last step."""
    metrics = read_metrics(run.metrics)
    rows = [{name: _short(row.get(name)) for name in ("step", *METRICS)} for row in metrics]
    create_table_artifact(rows, key=_key(run, "metrics"), description=f"{run.name}, by step")
    last = [run.spans(batch) for batch in batches_of(run, len(metrics) - 1)]
    create_markdown_artifact(transcripts(last), key=_key(run, "transcripts"))


def _short(value: float | None) -> float | None:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _key(run: RunFolder, what: str) -> str:
    """Return an artifact key, of lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", f"{run.name}-{what}".lower()).strip("-")
