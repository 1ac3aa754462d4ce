"""The end of a step of an open run: its metrics, which end it, and whether it is the last."""

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import cache

from prefect import get_run_logger

from ratchet.adapters.errors import counted
from ratchet.flows.checkpoints.policies import RunPolicy
from ratchet.flows.opening.flow_runs import wait_for_budget
from ratchet.flows.opening.run import OpenRun
from ratchet.flows.recipe.run_recipe import RunRecipe
from ratchet.flows.recipe.service_needs import may_offer
from ratchet.tasks.given.measures import read_measure
from ratchet.tasks.metrics import StepFiles, drop_costs, measure_step, name_metrics
from ratchet.tasks.recording.scores import is_scored, read_evaluation
from ratchet.tasks.recording.step_log import Metrics, record_metrics
from ratchet.tasks.reports.facts import LOSS, ask_failures, read_facts
from ratchet.tasks.reports.progress import describe_step
from ratchet.tasks.settings.run import MEASURED, Stop
from ratchet.tasks.spending.ledger import WARNED_AT, measure_budget
from ratchet.tasks.storage.files import is_written
from ratchet.tasks.storage.manifest import REPLAY, parent_of
from ratchet.tasks.storage.names import shard_name
from ratchet.tasks.storage.run_folder import RunFolder
from ratchet.tasks.updates import read_update

log = logging.getLogger(__name__)

Measure = Callable[[], Metrics]
"""Measures what a policy made of a step, the first time that it is called."""


def begin_steps(run: OpenRun) -> None:
    """Begin the steps that are left, unless the run's budget is spent."""
    run.tracking.follow()
    check_budget(run)


def measure_of(
    policy: RunPolicy, step: int, files: Callable[[], StepFiles], min_group_size: int = 1
) -> Measure:
    """Return the measure of what a policy made of a step, by all but its update."""
    loss = policy.updater.recorded.methods.at(step).loss
    return cache(lambda: measure_step(files(), policy.roles, min_group_size, loss))


def record_step(
    run: OpenRun,
    step: int,
    measures: Mapping[str, Measure],
    extra: Mapping[str, float] | None = None,
) -> None:
    """Record the metrics of a step, which ends the step; log what was not trained on.

    Checkpoints that nothing needs any more are deleted before that. `measures` has each policy's.
    `extra` metrics are recorded too. A step whose rollouts another run sampled costs nothing here.
    """
    if step + 1 == run.end():
        for policy in run.policies:
            policy.updater.save_due_state()
    metrics: Metrics = {**(extra or {}), **run.spending.since_last()}
    for policy in run.policies:
        measured = measures[policy.name]() | read_update(run.folder.update(policy.name, step))
        metrics |= name_metrics(policy.name, measured if run.on_policy else drop_costs(measured))
    _tell_untrained(run, step, metrics)
    run.policies.delete_unneeded(run.service)
    run.folder.check_owner()
    record_metrics(run.folder.metrics, step, metrics)
    run.folder.put()
    run.tracking.follow()
    get_run_logger().info(describe_step(run.folder, {"step": step, **metrics}))
    check_budget(run)


def check_budget(run: OpenRun) -> None:
    """Say once that most of a run's budget is spent; if all is, with steps left, wait or stop."""
    left = run.steps_left()
    if left.start >= left.end():
        return
    spent = measure_budget(run.folder, run.budget)
    if spent.share >= 1:
        for policy in run.policies if may_offer(run.folder, "optimizer") else ():
            policy.updater.keep_state()
        wait_for_budget(run.folder, run.budget, spent.words)
        check_budget(run)
    elif spent.share >= WARNED_AT > measure_budget(run.folder, run.budget, but_last=True).share:
        log.warning("%s has spent %s", run.folder.name, spent.words)


def _tell_untrained(run: OpenRun, step: int, metrics: Metrics) -> None:
    failed, rewarded = (int(metrics.get(f"rollouts/{end}", 0)) for end in ("failed", "ok"))
    if failed:
        log.warning(
            "%d of the %d rollouts of %s failed, and train nothing. To see why: `%s`",
            failed,
            failed + rewarded,
            shard_name("train", step),
            ask_failures(run.folder.name),
        )
    if metrics.get("judge/abstained") == 1:
        log.warning(
            "step %d was not trained: the judge has given no rollout a score. To see its answers: "
            "`ratchet sql --run %s \"select step, said from calls where split = 'judge'\"`",
            step,
            run.folder.name,
        )


class EarlyEnd:
    """The end of a run by its recipe's `stop`, which looks at each evaluation once.

    Evaluations that a fork shares with its parent decide nothing, nor do those of a replay, which
    ends where its parent has ended.
    """

    def __init__(self, recipe: RunRecipe, run: RunFolder) -> None:
        parent = parent_of(run) if recipe.stop.is_given else None
        how, shared = ("", 0) if parent is None else (parent["how"], parent["step"])
        self._recipe, self._run = recipe, run
        self._decides = recipe.stop.is_given and how != REPLAY
        self._first = self._next = shared + 1 if shared else 0
        self._looked = False

    def look(self, last: int) -> None:
        """Record the end that checkpoints up to `last`, which are scored, decide."""
        stop, steps = self._recipe.stop, self._recipe.steps
        if not self._decides or is_written(self._run.end):
            return
        is_due = self._recipe.evaluation.due
        for step in (one for one in range(self._next, last + 1) if is_due(one, steps)):
            if not (found := dict(self._measured(step))):
                continue
            first, self._looked = not self._looked, True
            why = stop.met(found, first=first) or self._without_gain(stop, step)
            end = step + 2 * self._recipe.lag + 1
            if why and end < steps:
                self._run.record_end(end, f"after checkpoint {step}: {why}")
                return
        self._next = max(self._next, last + 1)

    def _measured(self, step: int) -> Iterator[tuple[str, float]]:
        """Yield what was measured of a checkpoint, by name; nothing if it is not there."""
        if is_written(file := self._run.measure(step)):
            found = read_measure(file)
            yield MEASURED + found.measure, found.value
            yield from ((MEASURED + name, value) for name, value in found.beside.items())
        elif is_scored(file := self._run.evaluation(f"{step:05d}")):
            for how, score in read_evaluation(file).items():
                prefix = MEASURED + ("" if how == "sampled" else f"{how}/")
                yield from score.metrics(prefix.rstrip("/")).items()

    def _without_gain(self, stop: Stop, step: int) -> str:
        """Say that the last evaluations up to a checkpoint have no gain; empty if they have."""
        values = read_facts(self._run).held_out
        known = {at: one for at, one in values.by_step.items() if self._first <= at <= step}
        if not stop.patience or len(known) <= stop.patience:
            return ""
        best = (min if values.measure == LOSS else max)(known, key=lambda at: known[at])
        later = sum(at > best for at in known)
        if later < stop.patience:
            return ""
        return f"{counted(later, 'evaluation')} without a gain over checkpoint {best}"
