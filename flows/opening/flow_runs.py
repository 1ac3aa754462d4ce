"""Flow runs: their names, their retries, and the summaries and states that they end with."""

import logging
from collections import Counter
from collections.abc import Mapping
from functools import cache
from itertools import chain
from typing import Protocol, TypeVar, cast
from uuid import UUID, uuid4

import coolname.data
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import Pause
from prefect.flow_runs import pause_flow_run, suspend_flow_run
from prefect.input import RunInput
from prefect.runtime import deployment, flow_run
from prefect.states import Completed
from pydantic import BaseModel, Field
from tenacity import RetryCallState, retry, retry_if_exception_type, stop_after_attempt

from ratchet.adapters.errors import EngineDied, UserError, counted
from ratchet.flows.recipe.loading import read_recipe
from ratchet.flows.recipe.plan import BEST
from ratchet.flows.recipe.run_recipe import RunRecipe
from ratchet.flows.recipe.service_needs import may_offer
from ratchet.tasks.recording.step_log import REWARDED, steps_done
from ratchet.tasks.reports.facts import LOSS, Measure, read_facts
from ratchet.tasks.settings.run import Budget
from ratchet.tasks.spending.ledger import TOKEN_KINDS, budget_of, grant, missing_price, sum_spent
from ratchet.tasks.spending.work_log import granted_at
from ratchet.tasks.storage.manifest import recipe_of
from ratchet.tasks.storage.run_folder import RunFolder, name_run

NOTHING = "nothing, by dataset.held_out 0"
STARTS = 3
"""Starts of a run in one process, if its engine dies each time."""
APPROVAL_SECONDS = 14 * 24 * 3600
"""Time in which the budget of a stage can be approved, before its flow run fails."""


class LargerBudget(RunInput):
    """Limits that whoever resumes a paused flow run gives it; without one, twice its own.

    The server refuses a limit that the form does not have.
    """

    tokens: int | None = Field(default=None, gt=0, description="Tokens of all kinds")


class LargerPricedBudget(LargerBudget):
    """The same limits, and dollars, of a run whose model has a price."""

    usd: float | None = Field(default=None, gt=0, description="US dollars")


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


def wait_for_budget(run: RunFolder, budget: Budget, spent: str) -> None:
    """Suspend a deployed flow run until its budget is approved; stop any other one (UserError).

    Nothing is lost, since every step is on disk: a run that is continued goes on behind it. A
    suspended flow run has no process, which would lose its place among those that a deployment's
    `concurrency_limit` allows. A worker plays it again when it is resumed; then this returns. A
    stage of a deployed flow run is paused: the process of that flow run waits.
    """
    way = f"`ratchet resume {run.name} --budget tokens=…` (or usd) goes on"
    if deployment.id is None:
        raise UserError(f"{run.name} has spent {spent}, and stops; {way}")
    text = "%s has spent %s, and waits; approve it in Prefect's page, or %s"
    log.warning(text, run.name, spent, way)
    limits = budget_of(run, budget).limits()
    unpriced = missing_price(recipe_of(run)["model"]["base"])
    asked = (LargerBudget if unpriced else LargerPricedBudget).with_initial_data(
        f"{run.name} has spent {spent}. Give it a larger limit; without one its own is doubled."
    )
    given = _wait_for(asked, run, f"{run.name} has spent {spent}; {way}").model_dump(
        exclude_none=True
    )
    if given or budget_of(run, budget).limits() == limits:  # nobody has given it one meanwhile
        grant(run, given or {name: 2 * of for name, of in limits.items()})


def _wait_for(asked: type[LargerBudget], run: RunFolder, why: str) -> LargerBudget:
    """Suspend the flow run; pause it where another one plays it, which Prefect cannot suspend.

    The key of a suspension is the same when the run is played again.
    """
    if flow_run.parent_flow_run_id is None:
        key = f"budget-{steps_done(run.metrics)}-{len(granted_at(run))}"
        try:
            return suspend_flow_run(wait_for_input=asked, key=key)
        except Pause as pause:
            _explain(pause.state, why)
            raise
    return pause_flow_run(wait_for_input=asked, timeout=APPROVAL_SECONDS, key=str(uuid4()))


def _explain(state: State[object] | None, why: str) -> None:
    """Set the state in which the flow run waits again, with what its page says of it."""
    assert state is not None
    with get_client(sync_client=True) as client:
        told = state.model_copy(update={"message": why})
        client.set_flow_run_state(UUID(flow_run.id), told, force=True)


def name_of_run() -> str:
    """Name the run of the current flow run.

    The name is the parameter `run`, else the name that somebody gave the flow run, else the
    recipe's subject with the flow run's id.
    """
    parameters, name = flow_run.parameters, str(flow_run.name)
    if {*name.split("-")} <= _prefect_words():
        name = f"{parameters['recipe'].subject}-{str(flow_run.id)[:8]}"
    return parameters.get("run") or name_run(name)


@cache
def _prefect_words() -> set[str]:
    """Return the words from which Prefect makes the names of flow runs that nobody named."""
    return {word for part in coolname.data.config.values() for word in part.get("words", ())}


class RunSummary(BaseModel, frozen=True):
    """Results of a run, at its end or so far.

    - `before`, `after`: the held-out `measure` (reward, loss or accuracy) of checkpoint 0 and of
      the last one.
    - `gain`: their difference over the examples that both have, with its 95 % interval, in words;
      empty if it is not known.
    - `measures`: the first and the last mean of each measure of the agent's own, in words.
    - `seconds`: time of sampling and training, without start-up and evaluation, and only of a
      fork's own steps; None with a lag, where they overlap.
    - `rewarded`: number of rollouts that had the reward of an error, by its name.
    - `failed`: number of rollouts that failed; no step was trained on them. `error` is the error of
      the last one.
    - `untrained`: number of steps that trained nothing, and `why`, the commonest reason.
    - `drift`: in a replay, the KL of each step's weights from the weights that sampled it.
    - `reproducible`: whether another run of the recipe has the same weights.
    - `tokens`: what the service has computed for the run, of all kinds; `usd`: the price of that
      and of helpers, as far as it is known.
    - `best`: the step and the score of the best checkpoint, if others than the ends were scored; it
      expires at the age of `kept_seconds`.
    - `ended_early`: why the run has fewer steps than its recipe; empty if it has all.
    - `held_out`: how held-out examples were taken from a data set without splits.
    """

    run: str
    steps: int
    before: float | None
    after: float | None
    seconds: float | None
    gain: str = ""
    rewarded: Mapping[str, int] = {}
    measures: str = ""
    failed: int = 0
    error: str = ""
    untrained: int = 0
    why: str = ""
    drift: tuple[float, ...] = ()
    reproducible: bool = True
    measure: Measure = "reward"
    best: tuple[int, float] | None = None
    kept_seconds: int | None = None
    held_out: str = ""
    tokens: int = 0
    usd: float | None = None
    ended_early: str = ""

    @property
    def outcome(self) -> str:
        """Change of what was measured on held-out examples, in words."""
        if self.before is None and self.after is None and self.held_out == NOTHING:
            return f"{counted(self.steps, 'step')}, measured on nothing"
        before, after = map(self._written, (self.before, self.after))
        untrained = f", {self.untrained} of which trained nothing" if self.untrained else ""
        if self.is_untrained:
            untrained = f", which trained nothing: {self.why}"
        steps = counted(self.steps, "step")
        cost = "" if self.usd is None else f", for ${self.usd:.2f}"
        why = f", {self.ended_early}" if self.ended_early else ""
        return f"held-out {self.measure} {before} → {after} in {steps}{untrained}{why}{cost}"

    @property
    def is_untrained(self) -> bool:
        """Whether the weights are those that the run began with, since no step trained anything."""
        return 0 < self.steps == self.untrained

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
    recipe, facts = read_recipe(run), read_facts(run)
    values, replayed = facts.held_out, facts.is_replay
    before, after = (values.by_step.get(step) for step in (0, facts.done))
    known = before is not None and after is not None and facts.done > 0
    scored = len(values.by_step) > 2
    reasons, spent = Counter(facts.untrained), sum_spent(run)
    return RunSummary(
        run=run.name,
        steps=facts.done,
        before=before,
        after=after,
        gain=str(facts.gain or "") if known else "",
        measures=facts.own_gains,
        seconds=None if recipe.lag else facts.own_seconds,
        rewarded={
            name.removeprefix(REWARDED): facts.sum(name)
            for name in sorted({*chain(*facts.metrics)})
            if name.startswith(REWARDED)
        },
        failed=facts.sum("rollouts/failed"),
        error=str(facts.last_failure() or ""),
        untrained=reasons.total(),
        why=next((why for why, _ in reasons.most_common(1)), ""),
        drift=facts.drift if replayed else (),
        reproducible=replayed or may_offer(run, "seeds"),
        measure=values.measure if values.by_step or recipe.plays_rollouts else LOSS,
        best=(values.best, values.by_step[values.best]) if scored else None,
        kept_seconds=recipe.checkpoints.ttl_seconds if scored else None,
        held_out=describe_held_out(recipe),
        tokens=int(sum(spent.get(kind, 0) for kind in TOKEN_KINDS)),
        usd=spent.get("usd"),
        ended_early=f"of {recipe.steps}, ended early {why}" if (why := facts.ended_early) else "",
    )


def describe_held_out(recipe: RunRecipe) -> str:
    """Say what is held out of data sets without splits; empty if all have splits, or are gone."""
    try:
        said = [source.describe_division() for source in recipe.sources().values()]
    except UserError:
        return ""
    return "; ".join(dict.fromkeys(filter(None, said))) if recipe.holds_out() else NOTHING


def completed(result: T) -> T:
    """Return the final state of a flow that returns `result`; its message is the outcome.

    Prefect takes a returned state as the flow run's, and gives the caller of the flow its result.
    """
    return cast(T, Completed(message=result.outcome, data=result))


def end_run(run: RunFolder) -> RunSummary:
    """Return the final state of a flow that has trained a run, with the run's summary."""
    return completed(summarize_run(run))
