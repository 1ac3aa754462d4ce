"""A run → its curves: metrics and evaluations by step, by minutes and by sampled tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from adapters.calls import POLICY
from tasks.recording.views import Views, evaluation_rows
from tasks.storage.arrivals import batches_of
from tasks.storage.json_files import read_log
from tasks.storage.run_folder import RunFolder
from tasks.storage.tables import query_beside

QUERY = query_beside(__file__)

StepMetrics = Mapping[str, float]


@dataclass(frozen=True)
class HeldOutScore:
    """Mean reward of held-out examples at a checkpoint, with its 95 % interval if there is one."""

    step: int
    played: str
    reward: float
    interval: Sequence[float] | None


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
    chosen: bool = False
    """Whether it is the run that a sweep has chosen."""

    def of_policy(self, policy: str) -> list[StepMetrics]:
        """Return the metrics of a policy, under their plain names, by step."""
        prefix = "" if policy == POLICY else f"policies/{policy}/"
        return [
            {key.removeprefix(prefix): row[key] for key in row if key.startswith(prefix)}
            for row in self.metrics
        ]


def metric_names(runs: Sequence[RunCurves]) -> list[str]:
    """List the metrics that some step of some run has, in the order in which they appear."""
    rows = [row for run in runs for row in run.metrics]
    return [*dict.fromkeys(name for row in rows for name in row if name != "step")]


def read_curves(run: RunFolder, views: Views) -> RunCurves:
    """Read the curves of a run, whose spans are in `views`."""
    curves = read_step_curves(run)
    return replace(curves, minutes=_minutes(run, len(curves.metrics), views))


def read_step_curves(run: RunFolder) -> RunCurves:
    """Read the curves of a run without its minutes, for which alone spans are read."""
    return replace(read_metric_curves(run), scores=read_scores(run))


def read_metric_curves(run: RunFolder) -> RunCurves:
    """Read the curves of a run's metrics, without its minutes and its scores."""
    metrics, policies = read_log(run.metrics), run.policies()
    names = ["tokens/sampled", *(f"policies/{name}/tokens/sampled" for name in policies)]
    sampled = (sum(row.get(name, 0) for name in names) for row in metrics)
    return RunCurves(run.name, metrics, policies, (), [0.0, *accumulate(sampled)], ())


def read_scores(run: RunFolder) -> list[HeldOutScore]:
    """Read the held-out scores of a run's own evaluations, in the order of checkpoints."""
    return [
        HeldOutScore(
            row["step"],
            row["played"],
            row["reward"],
            None if row["lower"] is None else (row["lower"], row["upper"]),
        )
        for row in evaluation_rows(run)
        if row["category"] == "all"
        and row["reward"] is not None
        and row["evaluation"] == f"{row['step']:05d}"
    ]


def first_and_last(scores: Sequence[HeldOutScore]) -> list[HeldOutScore]:
    """Return the first and the last score of the first way of sampling; one if there is one."""
    first = [score for score in scores if score.played == scores[0].played]
    return [*first[:1], *first[1:][-1:]]


def describe_ends(values: Sequence[float], digits: int = 2) -> str:
    """Write the first and the last of some values, with so many decimals: `0.21 → 0.96`."""
    return " → ".join(f"{value:.{digits}f}" for value in [*values[:1], *values[1:][-1:]])


def _minutes(run: RunFolder, steps: int, views: Views) -> list[float]:
    """Return the minutes of the run at which the rollouts of each step had ended."""
    openings = [row["opened"] for row in read_log(run.owners)]
    minutes = dict(views.execute(QUERY, {"openings": openings}).fetchall())
    passed = [0.0]
    for step in range(steps):
        ended = [minutes[batch] for batch in batches_of(run, step) if batch in minutes]
        passed.append(max([passed[-1], *ended]))
    return passed
