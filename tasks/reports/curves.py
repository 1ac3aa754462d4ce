"""A run → its curves: metrics and evaluations by step, by minutes and by sampled tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from adapters.calls import POLICY
from tasks.recording.views import Views
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
    """Read the curves of a run, whose spans and evaluations are in `views`."""
    metrics, policies = read_log(run.metrics), run.policies()
    names = ["tokens/sampled", *(f"policies/{name}/tokens/sampled" for name in policies)]
    sampled = (sum(row.get(name, 0) for name in names) for row in metrics)
    scores = views.execute(
        "select step, played, reward, case when lower is not null then [lower, upper] end "
        "from evaluations "
        "where category = 'all' and reward is not null and evaluation = format('{:05d}', step) "
        "order by step"
    ).fetchall()
    return RunCurves(
        name=run.name,
        metrics=metrics,
        policies=policies,
        minutes=_minutes(run, len(metrics), views),
        tokens=[0.0, *accumulate(sampled)],
        scores=[HeldOutScore(*row) for row in scores],
    )


def _minutes(run: RunFolder, steps: int, views: Views) -> list[float]:
    """Return the minutes of the run at which the rollouts of each step had ended."""
    openings = [row["opened"] for row in read_log(run.owners)]
    minutes = dict(views.execute(QUERY, {"openings": openings}).fetchall())
    passed = [0.0]
    for step in range(steps):
        ended = [minutes[batch] for batch in batches_of(run, step) if batch in minutes]
        passed.append(max([passed[-1], *ended]))
    return passed
