"""The record of a step of an open run: its metrics, which end it, and what is said of it."""

import logging
from collections.abc import Callable, Mapping
from functools import cache, partial

from prefect import get_run_logger

from ratchet.adapters.process.clock import CLOSING, phases
from ratchet.durable.process import collect_garbage
from ratchet.flows.checkpoints.policies import RunPolicy
from ratchet.flows.diagnosis.service import may_offer
from ratchet.flows.opening.flow_runs import wait_for_budget
from ratchet.flows.opening.run import OpenRun
from ratchet.tasks.metrics import StepFiles, drop_costs, measure_step, name_metrics
from ratchet.tasks.recording.step_log import Metrics, record_metrics
from ratchet.tasks.reports.facts import ask_failures
from ratchet.tasks.reports.progress import describe_step
from ratchet.tasks.spending.budgets import WARNED_AT, measure_budget
from ratchet.tasks.updates import read_update

log = logging.getLogger(__name__)

Measure = Callable[[], Metrics]
"""Measures what a policy made of a step, the first time that it is called."""


def begin_steps(run: OpenRun, phase: str) -> None:
    """Begin the steps that are left, unless the run's budget is spent."""
    phases().enter(phase)
    run.tracking.follow()
    check_budget(run)


def measure_of(policy: RunPolicy, step: int, files: StepFiles, min_group_size: int = 1) -> Measure:
    """Return the measure of what a policy made of a step, by all but its update."""
    loss = policy.updater.recorded.methods.at(step).loss
    return cache(partial(measure_step, files, policy.roles, min_group_size, loss))


def record_step(
    run: OpenRun,
    step: int,
    measures: Mapping[str, Measure],
    extra: Mapping[str, float] | None = None,
) -> None:
    """Record the metrics of a step, which ends the step; log what was not trained on.

    Checkpoints that nothing needs any more are deleted before that.

    `measures` has each policy's. `extra` metrics are recorded too. A step whose rollouts another
    run sampled costs nothing here.
    """
    with phases().within(CLOSING):
        if step + 1 == run.end():
            for policy in run.policies:
                policy.updater.save_due_state()
        _record_step(run, step, measures, extra or {})
    check_budget(run)


def _record_step(
    run: OpenRun, step: int, measures: Mapping[str, Measure], extra: Mapping[str, float]
) -> None:
    metrics: Metrics = {**extra, **run.spending.since_last()}
    for policy in run.policies:
        measured = measures[policy.name]() | read_update(run.folder.update(policy.name, step))
        metrics |= name_metrics(policy.name, measured if run.on_policy else drop_costs(measured))
    _tell_untrained(run, step, metrics)
    if run.retention is not None:
        for policy in run.policies:
            run.retention.delete_unneeded(policy.ledger, run.service)
    run.folder.check_owner()
    record_metrics(run.folder.metrics, step, metrics)
    run.tracking.follow()
    collect_garbage()
    get_run_logger().info(describe_step(run.folder, {"step": step, **metrics}))


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
            "in step %d %d of %d rollouts failed, and train nothing. To see why: `%s`",
            step,
            failed,
            failed + rewarded,
            ask_failures(run.folder.name),
        )
    if metrics.get("judge/abstained") == 1:
        log.warning(
            "step %d was not trained: the judge has given no rollout a score. To see its answers: "
            "`ratchet sql --run %s \"select step, said from calls where split = 'judge'\"`",
            step,
            run.folder.name,
        )
