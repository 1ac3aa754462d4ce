"""The arrows after sampling, each over all policies of a run.

A step of several policies has one file of each arrow for each policy. `ByPolicy` maps a policy's
name to its file.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from prefect import get_run_logger

from adapters.calls import POLICY
from flows.runtime.open_run import OpenRun
from tasks.algorithm.advantages import CreditAssignment
from tasks.datums import build_datums, datums_of_batch
from tasks.given.given import Drawing, Given, draw_given
from tasks.judging.verdicts import measure_verdicts, record_verdicts
from tasks.metrics import StepFiles, drop_costs, measure, name_expert, name_metrics
from tasks.recording.step_log import Metrics, record_metrics
from tasks.references import References, compute_references
from tasks.reports.failures import ask_failures
from tasks.reports.progress import describe_step
from tasks.rewards import compute_rewards
from tasks.storage.arrivals import batches_of
from tasks.storage.manifest import ancestors
from tasks.storage.tables import flat, read
from tasks.trajectories import assemble_trajectories
from tasks.updates import read_update, update_policy

ByPolicy = Mapping[str, Path]
Scored = Mapping[str, Mapping[str, Path]]
"""Policy's name → whose log-probabilities → their file."""

log = logging.getLogger(__name__)


def assemble(run: OpenRun, step: int, spans: Sequence[Path]) -> ByPolicy:
    """Assemble the trajectories of a step's rollouts: the calls of each policy's roles."""
    at = run.folder.trajectories
    return {p.name: assemble_trajectories(at(p.name, step), spans, p.roles) for p in run.policies}


def reward(
    run: OpenRun,
    step: int,
    trajectories: ByPolicy,
    query: str | None = None,
    verdicts: Path | None = None,
) -> ByPolicy:
    """Compute the rewards that the trajectories of a step are compared by, shaped by a query.

    They are the agent's or, if there are `verdicts`, a judge's.
    """
    at = run.folder.rewards
    return {
        name: compute_rewards(at(name, step), rows, query, verdicts)
        for name, rows in trajectories.items()
    }


def conclude(run: OpenRun, step: int, judged: Sequence[Path]) -> Path | None:
    """Record what a judge says of a step's rollouts: nothing, if there is no judge."""
    return record_verdicts(run.folder.verdicts(step), judged) if judged else None


def measure_judge(
    run: OpenRun, verdicts: Path | None, judged: Sequence[Path], spans: Sequence[Path]
) -> Metrics:
    """Measure a judge's work on a step: nothing, if there is no judge."""
    if verdicts is None:
        return {}
    return measure_verdicts(verdicts, judged, spans, ancestors(run.folder))


def refer(
    run: OpenRun,
    step: int,
    spans: Sequence[Path],
    trajectories: ByPolicy,
    references: Mapping[str, References],
) -> Scored:
    """Compute the log-probabilities of a step's tokens under the reference and the teachers."""
    at, shards = run.folder.references, run.folder.shards_of(batches_of(run.folder, step))
    return {
        name: {
            source: compute_references(at(name, step, source), rows, of_source, shards, spans)
            for source, of_source in references.items()
        }
        for name, rows in trajectories.items()
    }


def build(
    run: OpenRun,
    step: int,
    trajectories: ByPolicy,
    rewards: ByPolicy,
    references: Scored,
    credit: CreditAssignment,
) -> ByPolicy:
    """Build the datums of a step: each sampled token weighted by its advantage."""
    at = run.folder.datums
    return {
        p.name: build_datums(
            at(p.name, step),
            trajectories[p.name],
            rewards[p.name],
            credit,
            references.get(p.name),
            p.updater.recorded.source.history(step),
        )
        for p in run.policies
    }


def draw(run: OpenRun, step: int, texts: Given | None, drawing: Drawing) -> list[ByPolicy]:
    """Draw the expert's texts that a step trains beside its rollouts, if there is an expert."""
    if texts is None:
        return []
    return [{POLICY: draw_given(run.folder.expert(POLICY, step), texts, drawing, step)}]


def measure_expert(texts: Given | None, drawn: Sequence[ByPolicy]) -> Metrics:
    """Measure the expert's texts that a step trains: none, if there is no expert."""
    if texts is None:
        return {}
    (of_policy,) = drawn
    tokens = int(flat(read(of_policy[POLICY], ["mask"])["mask"]).sum())
    return name_expert({**texts.measure(of_policy[POLICY]), "tokens": tokens})


def accumulate(run: OpenRun, step: int, spans: Path, credit: CreditAssignment) -> None:
    """Submit the forward-backward pass of a rollout batch, before the step's others have ended."""
    for policy in run.policies:
        datums = datums_of_batch(spans, policy.roles, credit)
        if datums.num_rows:
            policy.updater.accumulate(step, datums)


def update(run: OpenRun, step: int, datums: Sequence[ByPolicy], *, with_state: bool) -> ByPolicy:
    """Train each policy on its datums by the recipe's method, and save checkpoint `step` + 1.

    There are datums for each term of the method's loss.
    """
    at = run.folder.update
    return {
        p.name: update_policy(
            at(p.name, step), p.updater, step, [of[p.name] for of in datums], with_state
        )
        for p in run.policies
    }


def record_step(
    run: OpenRun,
    step: int,
    files: StepFiles,
    min_group_size: int = 1,
    known: Mapping[str, float] | None = None,
) -> Metrics:
    """Measure a step and record its metrics, which ends the step; log what was not trained on.

    Metrics that are `known` already are recorded with them. A step whose rollouts another run
    sampled costs nothing here.
    """
    metrics: Metrics = {**(known or {})}
    for policy in run.policies:
        loss = policy.updater.recorded.methods.at(step).loss
        measured = measure(files, policy.name, policy.roles, min_group_size, loss)
        measured |= read_update(files.updates[policy.name])
        metrics |= name_metrics(policy.name, measured if run.on_policy else drop_costs(measured))
    _tell_untrained(run, step, metrics)
    run.folder.check_owner()
    record_metrics(run.folder.metrics, step, metrics)
    run.tracking.follow()
    get_run_logger().info(describe_step(run.folder, {"step": step, **metrics}, run.steps))
    return metrics


def _tell_untrained(run: OpenRun, step: int, metrics: Metrics) -> None:
    failed, rewarded = (int(metrics.get(f"rollouts/{end}", 0)) for end in ("failed", "ok"))
    left_out = int(metrics.get("stragglers/count", 0))
    trained = f"step {step} was trained on {rewarded} of its {rewarded + failed + left_out}"
    if failed:
        log.warning(
            "%s rollouts: %d failed. To see why: `%s`",
            trained,
            failed,
            ask_failures(run.folder.name),
        )
    if metrics.get("judge/abstained") == 1:
        log.warning(
            "step %d was not trained: the judge has given no rollout a score. To see its answers: "
            "`ratchet sql --run %s \"select step, said from calls where split = 'judge'\"`",
            step,
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
