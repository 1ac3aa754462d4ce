"""What a finished run came to, in numbers a person asks for first."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from tasks.evaluations import read_evaluation
from tasks.metrics import read_metrics


class Outcome(BaseModel):
    """Held-out reward of the first and the last checkpoint, and what lay between."""

    model_config = ConfigDict(frozen=True)

    run: str
    steps: int
    before: float | None
    after: float | None
    seconds: float
    """Of sampling and training, without start-up and evaluation."""


def outcome_of(folder: Path) -> Outcome:
    """Read off a run's folder."""
    metrics = read_metrics(folder / "metrics.jsonl")
    return Outcome(
        run=folder.name,
        steps=len(metrics),
        before=_reward(folder, 0),
        after=_reward(folder, len(metrics)),
        seconds=sum(row["seconds/sampling"] + row["seconds/training"] for row in metrics),
    )


def _reward(folder: Path, step: int) -> float | None:
    path = folder / "evaluations" / f"{step:05d}.json"
    return read_evaluation(path)["sampled"].finished.mean if path.exists() else None
