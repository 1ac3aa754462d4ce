"""Train a policy by reinforcement learning on an agent's own rollouts.

Each step compares the rollouts of one example with each other (group-relative advantages, as
`algorithm.advantage` says), weighs every sampled token by the advantage of its call, and takes one
optimizer step on `algorithm.loss`. There is no value network, no reference policy unless
`algorithm.kl` has a coefficient, no teacher unless `algorithm.teacher` names one, and no text is
trained beside the rollouts unless `algorithm.expert` has some. Step s is sampled by the weights
after s - `rollouts.lag` updates, or after none while s is smaller.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from prefect import flow

from adapters.process.phases import CLOSING, EVALUATION, ROLLOUTS, phases
from flows.recipe.recipe import Recipe
from flows.runtime.checks import check_start
from flows.runtime.evaluation import HeldOutEvaluations
from flows.runtime.extras import Extras, open_extras
from flows.runtime.flow_runs import RunSummary, again_if_engine_dies, end_run, name_of_run
from flows.runtime.open_rollouts import open_rollouts
from flows.runtime.open_run import (
    Measure,
    OpenRun,
    check_budget,
    measure_of,
    open_run,
    record_step,
)
from flows.runtime.overlap import Following, PlayedStep, draw_train_shard, play_steps
from flows.runtime.policies import RunPolicy
from tasks.datums import build_datums
from tasks.metrics import StepFiles
from tasks.rewards import compute_rewards
from tasks.storage.run_folder import folder_of
from tasks.trajectories import assemble_trajectories
from tasks.updates import PlannedUpdate, update_policy


@flow(name="train", flow_run_name=name_of_run)
@again_if_engine_dies
def train(recipe: Recipe, run: str | None = None) -> RunSummary:
    """Train the model behind an agent.

    Args:
        recipe: Everything the run depends on.
        run: Its name, a folder under runs/; a run that exists continues where it stopped.
    """
    run = run or name_of_run()
    recipe = check_start(recipe, folder_of(run))
    with (
        open_run(recipe, run) as opened,
        open_rollouts(opened, recipe) as rollouts,
        open_extras(opened, recipe, rollouts.judging) as extras,
    ):
        draw = partial(draw_train_shard, recipe, opened.folder)
        steps = play_steps(opened, recipe, rollouts.training, draw)
        learn(opened, recipe, steps, HeldOutEvaluations(recipe, opened, rollouts), extras)
    return end_run(opened.folder)


def learn(
    run: OpenRun,
    recipe: Recipe,
    steps: Iterator[PlayedStep],
    evaluations: HeldOutEvaluations,
    extras: Extras,
) -> None:
    """Train the policies of a run on the rollouts of each step, and score what is due."""
    spent = phases()
    spent.enter(ROLLOUTS)
    run.tracking.follow()
    check_budget(run)
    start = run.steps_left().start
    evaluations.submit_due(start)
    evaluations.decide(start - 1 - recipe.rollouts.lag)  # again, if its record is gone
    for played in steps:
        step, spans = played.step, played.spans
        with spent.within(EVALUATION):
            evaluations.decide(step - recipe.rollouts.lag)
        measures = train_step(played, extras)
        evaluations.submit_due(step + 1)
        with spent.within(EVALUATION):
            evaluations.score(step - recipe.rollouts.lag)
        record_step(run, step, measures, extras.metrics(step, spans))
    with spent.within(EVALUATION):
        evaluations.score(run.end())
    spent.enter(CLOSING)


def train_step(played: PlayedStep, extras: Extras) -> dict[str, Measure]:
    """Train each policy on the rollouts of a step; return the measure of each by its name.

    The update of the next step follows at once if its rollouts end before this update has. While
    the service computes, the step is measured, and the next shard is drawn.
    """
    at, step, measures = extras.run.folder, played.step, dict[str, Measure]()
    smallest_group = extras.recipe.rollouts.min_group_size()
    verdicts = extras.verdicts(step, played.spans)
    for policy in extras.run.policies:
        name = policy.name
        files, trained = make_datums(extras, policy, step, played.spans, verdicts)
        measures[name] = measure_of(policy, step, files, smallest_group)
        if (following := played.following) is not None:
            make = partial(make_following, extras, policy, step + 1, following)
            policy.updater.plan(PlannedUpdate(step + 1, make, following.pending))
        beside = [*filter(None, (measures[name], played.draw_next))]
        # Passes of `algorithm.loss` (tasks/algorithm/losses.py), and the optimizer's step.
        update_policy(at.update(name, step), policy.updater, step, trained, beside)
    return measures


def make_following(
    extras: Extras, policy: RunPolicy, step: int, following: Following
) -> list[Path] | None:
    """Make the datums of a step that has begun; None if its rollouts have not ended well."""
    spans = following.ended_spans()
    return None if spans is None else make_datums(extras, policy, step, spans)[1]


def make_datums(
    extras: Extras,
    policy: RunPolicy,
    step: int,
    spans: Sequence[Path],
    verdicts: Path | None = None,
) -> tuple[StepFiles, list[Path]]:
    """Make what a policy is trained on at a step: return the step's files, and those of datums."""
    at, recipe, name = extras.run.folder, extras.recipe, policy.name
    query, credit = recipe.algorithm.rewards, recipe.credit()
    trajectories = assemble_trajectories(at.trajectories(name, step), spans, policy.roles)
    rewards = compute_rewards(at.rewards(name, step), trajectories, query, verdicts)
    logprobs = extras.logprobs(policy, step, spans, trajectories)
    # Rewards become advantages, by `algorithm.advantage` (tasks/algorithm/advantages.py).
    datums = build_datums(at.datums(name, step), trajectories, rewards, credit, logprobs)
    files = StepFiles(spans, trajectories, logprobs, datums, verdicts=verdicts)
    return files, [datums, *extras.datums(policy, step)]
