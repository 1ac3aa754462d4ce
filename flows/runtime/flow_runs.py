"""Flow runs: their names, their retries, and the summaries and states that they end with."""

import logging
from collections.abc import Sequence
from functools import cache
from typing import Literal, Protocol, TypeVar, cast

import coolname.data
from prefect.runtime import flow_run
from prefect.states import Completed
from pydantic import BaseModel
from tenacity import RetryCallState, retry, retry_if_exception_type, stop_after_attempt

from adapters.errors import EngineDied, UserError, counted
from flows.recipe.loading import read_recipe
from flows.recipe.recipe import Recipe
from flows.recipe.run_recipe import RunRecipe
from tasks.checkpoints import BEST, read_held_out
from tasks.evaluations import find_reward_gain
from tasks.given.held_out import find_measured_gain, read_measure
from tasks.recording.scores import Estimate, headline, read_evaluation
from tasks.recording.step_log import Metrics, read_metrics, spent_seconds
from tasks.reports.failures import last_failure
from tasks.storage.files import is_written
from tasks.storage.manifest import REPLAY, parent_of
from tasks.storage.run_folder import RunFolder, name_run

NOTHING = "nothing, by dataset.held_out 0"
STARTS = 3
"""Starts of a run in one process, if its engine dies each time."""


class Outcome(Protocol):
    """Result of a flow."""

    @property
    def outcome(self) -> str:
        """The result in words."""
        ...


T = TypeVar("T", bound=Outcome)

log = logging.getLogger(__name__)


def _log_death(ended: RetryCallState) -> None:
    assert ended.outcome is not None
    start, why = ended.attempt_number + 1, ended.outcome.exception()
    log.warning("the run is started again (start %d of %d), since %s", start, STARTS, why)


again_if_engine_dies = retry(
    retry=retry_if_exception_type(EngineDied),
    stop=stop_after_attempt(STARTS),
    before_sleep=_log_death,
    reraise=True,
)
"""Decorator of a flow's function, which goes on from the run's files if the engine dies.

Prefect would retry a flow after any error, also after a mistake of the user.
"""


def name_of_run() -> str:
    """Name the run of the current flow run.

    It has the name of its parameter `run`, else the one that the flow run was given, else its
    recipe's and the flow run's id.
    """
    parameters, name = flow_run.parameters, str(flow_run.name)
    if {*name.split("-")} <= _prefect_words():
        name = f"{parameters['recipe'].subject}-{str(flow_run.id)[:8]}"
    return parameters.get("run") or name_run(name)


@cache
def _prefect_words() -> set[str]:
    """Return the words of which Prefect makes the names of flow runs that are given none."""
    return {word for part in coolname.data.config.values() for word in part.get("words", ())}


class RunSummary(BaseModel, frozen=True):
    """Held-out reward, loss or accuracy of the first and the last checkpoint, and the steps.

    `measure` says which of them. `gain` is the difference of the two over the examples that both
    have, with its 95 % interval, in words; empty if it is not known. `seconds` are those of
    sampling and training, without start-up and evaluation, and of a fork's own steps alone; None
    with a lag, where they overlap. No step was trained on the rollouts that `failed`, of which
    `error` is the last one's, nor on those that were `left_out` as stragglers.
    `drift` is, in a replay, how far each step's weights were from those that sampled its rollouts.
    Another run of the recipe has the same weights if it is `reproducible`. `best` is the checkpoint
    that is best on held-out examples, with its score, if others than the ends were scored; it
    expires at the age of `kept_seconds`, if there is one. `held_out` says what is held out of a
    data set without splits.
    """

    run: str
    steps: int
    before: float | None
    after: float | None
    seconds: float | None
    gain: str = ""
    failed: int = 0
    error: str = ""
    left_out: int = 0
    drift: tuple[float, ...] = ()
    reproducible: bool = True
    measure: Literal["reward", "loss", "accuracy"] = "reward"
    best: tuple[int, float] | None = None
    kept_seconds: int | None = None
    held_out: str = ""

    @property
    def outcome(self) -> str:
        """Change of what was measured on held-out examples, in words."""
        if self.before is None and self.after is None and self.held_out == NOTHING:
            return f"{counted(self.steps, 'step')}, measured on nothing"
        before, after = map(self._written, (self.before, self.after))
        return f"held-out {self.measure} {before} → {after} in {counted(self.steps, 'step')}"

    @property
    def best_checkpoint(self) -> str:
        """Best checkpoint, and how long it is kept, in words; empty if it is not known."""
        if self.best is None:
            return ""
        step, score = self.best
        kept = self.kept_seconds
        expires = "" if kept is None else f", which expires {kept:,} s after it was saved"
        return f"step {step}, {self.measure} {self._written(score)}: {self.run}@{BEST}{expires}"

    def _written(self, score: float | None) -> str:
        return "unknown" if score is None else f"{score:.{3 if self.measure == 'loss' else 2}f}"


def summarize_run(run: RunFolder) -> RunSummary:
    """Summarize a run by its files."""
    recipe, scores = read_recipe(run), read_held_out(run)
    summary = _of_rollouts(run, recipe) if isinstance(recipe, Recipe) else _of_given(run)
    summary = summary.model_copy(update={"held_out": describe_held_out(recipe)})
    if len(scores.by_step) <= 2:
        return summary
    best, kept = scores.best, recipe.checkpoints.ttl_seconds
    return summary.model_copy(update={"best": (best, scores.by_step[best]), "kept_seconds": kept})


def describe_held_out(recipe: RunRecipe) -> str:
    """Say what is held out of data sets without splits; empty if there is none, or it is gone."""
    try:
        said = [source.describe_division() for source in recipe.sources().values()]
    except UserError:
        return ""
    return "; ".join(dict.fromkeys(filter(None, said))) if recipe.holds_out() else NOTHING


def _of_given(run: RunFolder) -> RunSummary:
    """Summarize a run that learns texts or pairs, by what it measures on held-out ones."""
    metrics = read_metrics(run.metrics)
    ends = [run.measure(step) for step in (0, len(metrics))]
    before, after = (read_measure(path) if is_written(path) else None for path in ends)
    gain = find_measured_gain(before, after) if before and after and metrics else None
    return RunSummary(
        run=run.name,
        steps=len(metrics),
        before=before.value if before else None,
        after=after.value if after else None,
        gain=str(gain or ""),
        seconds=_own_seconds(run, metrics),
        measure=measured.measure if (measured := before or after) else "loss",
    )


def _of_rollouts(run: RunFolder, recipe: Recipe) -> RunSummary:
    """Summarize a run that learns from rollouts, by the reward of held-out ones."""
    metrics, parent = read_metrics(run.metrics), parent_of(run)
    before, after = _held_out(run, 0), _held_out(run, len(metrics))
    gain = find_reward_gain(run, 0, len(metrics)) if before and after and metrics else None
    replayed = parent is not None and parent["how"] == REPLAY
    drift = [row["kl_sample_train_v2"] for row in metrics if "kl_sample_train_v2" in row]
    return RunSummary(
        run=run.name,
        steps=len(metrics),
        before=before.mean if before else None,
        after=after.mean if after else None,
        gain=str(gain or ""),
        seconds=None if recipe.rollouts.lag else _own_seconds(run, metrics),
        failed=sum(int(row.get("rollouts/failed", 0)) for row in metrics),
        error=str(last_failure(run) or ""),
        left_out=sum(int(row.get("stragglers/count", 0)) for row in metrics),
        drift=tuple(drift) if replayed else (),
        reproducible=replayed or not recipe.rollouts.not_reproducible(),
    )


def _own_seconds(run: RunFolder, metrics: Sequence[Metrics]) -> float:
    """Sum the seconds of the steps that a run has trained, which a fork shares with no parent."""
    parent = parent_of(run)
    return spent_seconds(metrics[parent["step"] if parent else 0 :])


def completed(result: T) -> T:
    """Return the final state of a flow that returns `result`; its message is the outcome.

    Prefect takes a returned state as the flow run's, and gives the caller of the flow its result.
    """
    return cast(T, Completed(message=result.outcome, data=result))


def end_run(run: RunFolder) -> RunSummary:
    """Return the final state of a flow that has trained a run, with the run's summary."""
    return completed(summarize_run(run))


def _held_out(run: RunFolder, step: int) -> Estimate | None:
    path = run.evaluation(f"{step:05d}")
    return headline(read_evaluation(path)) if is_written(path) else None
