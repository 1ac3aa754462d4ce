"""A run → its curves: metrics and evaluations by step, by minutes and by sampled tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import accumulate

from adapters.calls import POLICY
from tasks.recording.views import Views, evaluation_rows
from tasks.storage.arrivals import batches_of
from tasks.storage.json_files import read_log
from tasks.storage.run_folder import RunFolder
from tasks.storage.tables import query_beside

QUERY = query_beside(__file__)

OPENED = "%Y-%m-%d %H:%M:%S UTC"
"""Format of the time at which a process opened a run."""

StepMetrics = Mapping[str, float]


@dataclass(frozen=True)
class HeldOutScore:
    """Mean reward of held-out examples at a checkpoint, with its 95 % interval if there is one."""

    step: int
    played: str
    reward: float
    lower: float | None
    upper: float | None


@dataclass(frozen=True)
class RunCurves:
    """Curves of a run. Entry k of `minutes` and of `tokens` is what checkpoint k has cost.

    Minutes are those of the clock, up to the end of the last rollout, without the times in which no
    process had the run open. Tokens are those that the policies sampled in training.
    """

    name: str
    metrics: Sequence[StepMetrics]
    policies: Sequence[str]
    minutes: Sequence[float]
    tokens: Sequence[float]
    scores: Sequence[HeldOutScore]

    def of_policy(self, policy: str) -> list[StepMetrics]:
        """Return the metrics of a policy, under their plain names, by step."""
        if policy == POLICY:
            return [*self.metrics]
        prefix = f"policies/{policy}/"
        return [
            {key.removeprefix(prefix): row[key] for key in row if key.startswith(prefix)}
            for row in self.metrics
        ]


def read_curves(run: RunFolder, views: Views) -> RunCurves:
    """Read the curves of a run, whose spans are in `views`."""
    curves = read_step_curves(run)
    return replace(curves, minutes=_minutes(run, len(curves.metrics), views))


def read_step_curves(run: RunFolder) -> RunCurves:
    """Read the curves of a run without its minutes, for which alone spans are read."""
    metrics, policies = read_log(run.metrics), run.policies()
    names = ["tokens/sampled", *(f"policies/{name}/tokens/sampled" for name in policies)]
    sampled = (sum(row.get(name, 0) for name in names) for row in metrics)
    return RunCurves(run.name, metrics, policies, (), [0.0, *accumulate(sampled)], read_scores(run))


def read_scores(run: RunFolder) -> list[HeldOutScore]:
    """Read the held-out scores of a run's own evaluations, in the order of checkpoints."""
    return [
        HeldOutScore(*(row[name] for name in ("step", "played", "reward", "lower", "upper")))
        for row in evaluation_rows(run)
        if row["category"] == "all"
        and row["reward"] is not None
        and row["evaluation"] == f"{row['step']:05d}"
    ]


def _minutes(run: RunFolder, steps: int, views: Views) -> list[float]:
    """Return the minutes of the run at which the rollouts of each step had ended."""
    clock = {batch: (began, ended) for batch, began, ended in views.execute(QUERY).fetchall()}
    begins = min((began for began, _ in clock.values()), default=None)
    away = {opened: _away(opened, views) for opened in _openings(run)}
    passed = [0.0]
    for step in range(steps):
        ended = [clock[batch][1] for batch in batches_of(run, step) if batch in clock]
        if ended and begins is not None:
            last = max(ended)
            lost = sum(seconds for opened, seconds in away.items() if opened < last)
            passed.append(max(passed[-1], ((last - begins).total_seconds() - lost) / 60))
        else:
            passed.append(passed[-1])
    return passed


def _openings(run: RunFolder) -> list[datetime]:
    """List the times at which processes opened the run."""
    texts = [row["opened"] for row in read_log(run.owners)]
    return [datetime.strptime(text, OPENED).replace(tzinfo=UTC) for text in texts]


def _away(opened: datetime, views: Views) -> float:
    """Return the seconds from the last span before the run was opened until then."""
    query = "select max(ended) from spans where ended < $opened"
    ((last,),) = views.execute(query, {"opened": opened}).fetchall()
    return 0.0 if last is None else (opened - last).total_seconds()
