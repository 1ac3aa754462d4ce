"""What a finished run came to, in numbers a person asks for first."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from flows.runtime.forks import REPLAY, parent_of
from tasks.evaluations import read_evaluation
from tasks.metrics import read_metrics

SPENT = ("seconds/sampling", "seconds/training")
"""The ends of metrics' names: each policy has its training."""


class Outcome(BaseModel):
    """Held-out reward of the first and the last checkpoint, and what lay between."""

    model_config = ConfigDict(frozen=True)

    run: str
    steps: int
    before: float | None
    after: float | None
    seconds: float
    """Of sampling and training, without start-up and evaluation."""
    drift: tuple[float, ...] = ()
    """Of a replay: how far each step's weights were from those that sampled its rollouts."""


def outcome_of(folder: Path) -> Outcome:
    """Read off a run's folder."""
    metrics = read_metrics(folder / "metrics.jsonl")
    parent = parent_of(folder)
    replayed = parent is not None and parent["how"] == REPLAY
    return Outcome(
        run=folder.name,
        steps=len(metrics),
        before=_reward(folder, 0),
        after=_reward(folder, len(metrics)),
        seconds=sum(row[name] for row in metrics for name in row if name.endswith(SPENT)),
        drift=tuple(row["kl_sample_train_v2"] for row in metrics if "kl_sample_train_v2" in row)
        if replayed
        else (),
    )


def _reward(folder: Path, step: int) -> float | None:
    path = folder / "evaluations" / f"{step:05d}.json"
    return read_evaluation(path)["sampled"].finished.mean if path.exists() else None
