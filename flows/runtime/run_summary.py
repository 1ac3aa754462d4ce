"""Summary of a finished run, and the last state of its flow, which says the outcome."""

from typing import TypeVar, cast

from prefect.states import Completed
from pydantic import BaseModel, ConfigDict

from flows.recipe.recipe import Recipe
from tasks.evaluations import read_evaluation
from tasks.metrics import read_metrics
from tasks.reports.failures import last_failure
from tasks.storage.files import is_written
from tasks.storage.manifest import REPLAY, parent_of, recipe_of
from tasks.storage.run_folder import RunFolder

SPENT = ("seconds/sampling", "seconds/training")
"""Endings of metrics' names: every policy has its training."""

T = TypeVar("T")


class RunSummary(BaseModel):
    """Held-out reward of the first and the last checkpoint, and the steps between.

    `seconds` are those of sampling and training, without start-up and evaluation; None with a lag,
    where they overlap. No step was trained on the rollouts that `failed`, of which `error` is the
    last one's, nor on those that were `left_out` as stragglers. `drift` is, in a replay, how far
    each step's weights were from those that sampled its rollouts. Another run of the recipe has the
    same weights if it is `reproducible`.
    """

    model_config = ConfigDict(frozen=True)

    run: str
    steps: int
    before: float | None
    after: float | None
    seconds: float | None
    failed: int = 0
    error: str = ""
    left_out: int = 0
    drift: tuple[float, ...] = ()
    reproducible: bool = True

    @property
    def outcome(self) -> str:
        """Gain in held-out reward, in words."""
        before, after = (
            "unknown" if reward is None else f"{reward:.2f}" for reward in (self.before, self.after)
        )
        return f"held-out reward {before} → {after} in {self.steps} steps"


def summarize_run(run: RunFolder) -> RunSummary:
    """Summarize a run from its folder."""
    metrics, parent = read_metrics(run.metrics), parent_of(run)
    recipe = Recipe.model_validate(recipe_of(run))
    replayed = parent is not None and parent["how"] == REPLAY
    drift = [row["kl_sample_train_v2"] for row in metrics if "kl_sample_train_v2" in row]
    spent = [row[name] for row in metrics for name in row if name.endswith(SPENT)]
    return RunSummary(
        run=run.name,
        steps=len(metrics),
        before=_reward(run, 0),
        after=_reward(run, len(metrics)),
        seconds=None if recipe.rollouts.lag else sum(spent),
        failed=sum(int(row["rollouts/failed"]) for row in metrics),
        error=last_failure(run),
        left_out=sum(int(row.get("stragglers/count", 0)) for row in metrics),
        drift=tuple(drift) if replayed else (),
        reproducible=replayed or not recipe.rollouts.not_reproducible(),
    )


def complete(result: T, outcome: str) -> T:
    """Return the final state of a flow that returns `result`; its message is the `outcome`.

    Prefect takes a returned state as the flow run's, and gives the caller of the flow its result.
    """
    return cast(T, Completed(message=outcome, data=result))


def _reward(run: RunFolder, step: int) -> float | None:
    path = run.evaluation(f"{step:05d}")
    return read_evaluation(path)["sampled"].finished.mean if is_written(path) else None
