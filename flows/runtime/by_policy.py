"""The arrows after sampling, each over all policies of a run: train, replay and dry run share them.

A step of several policies has one file of each arrow for each policy. `ByPolicy` maps a policy's
name to its file.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

from flows.runtime.open_run import OpenRun
from flows.runtime.policies import RunPolicy
from flows.runtime.task_runner import Spans
from tasks.algorithm.advantages import CreditAssignment
from tasks.algorithm.update_method import UpdateMethod
from tasks.datums import build_datums, datums_of_batch
from tasks.metrics import Metrics, StepFiles, drop_costs, measure, name_metrics, record_metrics
from tasks.references import compute_references
from tasks.trajectories import assemble_trajectories
from tasks.updates import read_update, update_policy

ByPolicy = Mapping[str, Path]

log = logging.getLogger(__name__)


def assemble(run: OpenRun, step: int, spans: Sequence[Spans | Path]) -> ByPolicy:
    """Assemble the trajectories of a step's rollouts: the calls of each policy's roles."""
    at, files = run.folder.trajectories, cast("Sequence[Path]", spans)  # Prefect awaits futures
    return _each(run, lambda p: assemble_trajectories(at(p.name, step), files, p.roles))


def refer(run: OpenRun, step: int, trajectories: ByPolicy) -> ByPolicy:
    """Compute the log-probabilities of a step's tokens under the reference, if there is one."""
    at, reference = run.folder.references, run.reference
    if reference is None:
        return {}
    return _each(
        run, lambda p: compute_references(at(p.name, step), trajectories[p.name], reference)
    )


def accumulate(
    run: OpenRun,
    step: int,
    batches: Sequence[Spans],
    credit: CreditAssignment,
    method: UpdateMethod,
) -> None:
    """Submit the forward-backward pass of each batch when it has ended, in the batches' order."""
    for batch in batches:
        batch.wait()
        if not batch.state.is_completed():
            return
        for policy in run.policies:
            datums = datums_of_batch(batch.result(), policy.roles, credit, method)
            if datums:
                policy.updater.accumulate(step, datums, method)


def build(
    run: OpenRun,
    step: int,
    trajectories: ByPolicy,
    references: ByPolicy,
    credit: CreditAssignment,
) -> ByPolicy:
    """Build the datums of a step: each sampled token weighted by its advantage."""
    at = run.folder.datums
    return _each(
        run,
        lambda p: build_datums(
            at(p.name, step),
            trajectories[p.name],
            credit,
            references.get(p.name),
            p.updater.recorded.history(step),
        ),
    )


def update(
    run: OpenRun, step: int, datums: ByPolicy, method: UpdateMethod, *, with_state: bool
) -> ByPolicy:
    """Take one optimizer step of each policy on its datums, and save checkpoint `step` + 1."""
    at = run.folder.update
    return _each(
        run,
        lambda p: update_policy(
            at(p.name, step), p.updater, step, datums[p.name], method, with_state
        ),
    )


def record_step(
    run: OpenRun, step: int, files: StepFiles, min_group_size: int, *, sampled: bool = True
) -> Metrics:
    """Measure a step and record its metrics, which ends the step; log what was not trained on.

    A step whose rollouts another run sampled costs nothing here: `sampled` is False.
    """
    metrics: Metrics = {}
    for policy in run.policies:
        measured = measure(files, policy.name, policy.roles, min_group_size)
        measured |= read_update(files.updates[policy.name])
        metrics |= name_metrics(policy.name, measured if sampled else drop_costs(measured))
    _tell_untrained(run, step, metrics)
    run.folder.check_owner()
    record_metrics(run.folder.metrics, step, metrics)
    run.tracker.log(metrics, step)
    return metrics


def _tell_untrained(run: OpenRun, step: int, metrics: Metrics) -> None:
    failed, rewarded = int(metrics["rollouts/failed"]), int(metrics["rollouts/ok"])
    left_out = int(metrics.get("stragglers/count", 0))
    trained = f"step {step} was trained on {rewarded} of its {rewarded + failed + left_out}"
    if failed:
        log.warning(
            "%s rollouts: %d failed. To see why: ratchet sql "
            "--run %s 'from rollouts where error_type is not null'",
            trained,
            failed,
            run.folder.name,
        )
    if left_out:
        log.warning(
            "%s rollouts: %d were left out as stragglers, cut off after %.0f tokens on average; "
            "those with a reward have %.0f",
            trained,
            left_out,
            metrics["stragglers/tokens"],
            metrics.get("stragglers/kept_tokens", 0),
        )


def _each(run: OpenRun, arrow: Callable[[RunPolicy], Path]) -> ByPolicy:
    return {policy.name: arrow(policy) for policy in run.policies}
