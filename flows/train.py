"""Train a policy by reinforcement learning on an agent's own rollouts.

Each step compares the rollouts of one example with each other (group-relative advantages, as
`algorithm.advantage` says), weighs every sampled token by the advantage of its call, and takes one
optimizer step on `algorithm.loss`. There is no value network, no reference policy unless
`algorithm.kl` has a coefficient, no teacher unless `algorithm.teacher` names one, and no text is
trained beside the rollouts unless `algorithm.expert` has some. Step s is sampled by the weights
after s - `rollouts.lag` updates, or after none while s is smaller.
"""

from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path

from prefect import flow

from ratchet.flows.opening.checks import check_start
from ratchet.flows.opening.evaluation import HeldOutEvaluations
from ratchet.flows.opening.flow_runs import RunSummary, again_if_engine_dies, end_run, name_of_run
from ratchet.flows.opening.parts import StepPart, measure_parts, open_parts
from ratchet.flows.opening.rollouts import open_rollouts
from ratchet.flows.opening.run import OpenRun, open_run
from ratchet.flows.opening.step_records import Measure, begin_steps, measure_of, record_step
from ratchet.flows.opening.steps import PlayedStep, play_steps
from ratchet.flows.recipe.recipe import Recipe
from ratchet.tasks.datums import build_datums
from ratchet.tasks.metrics import StepFiles
from ratchet.tasks.rewards import compute_rewards
from ratchet.tasks.storage.run_folder import RunFolder, folder_of
from ratchet.tasks.trajectories import assemble_trajectories
from ratchet.tasks.updates import StepUpdate, update_policy


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
        open_parts(opened, recipe, rollouts.judging) as parts,
    ):
        steps = play_steps(opened, recipe, rollouts.training)
        learn(opened, recipe, steps, HeldOutEvaluations(recipe, opened, rollouts), parts)
    return end_run(opened.folder)


def learn(
    run: OpenRun,
    recipe: Recipe,
    steps: Iterator[PlayedStep],
    evaluations: HeldOutEvaluations,
    parts: Sequence[StepPart],
) -> None:
    """Train the policies of a run on the rollouts of each step.

    While the service computes an update, the step is measured, the next shard is drawn, and the
    next update is submitted if its rollouts have ended.
    """
    smallest = recipe.rollouts.min_group_size()
    begin_steps(run)
    evaluations.begin()
    for played in steps:
        step, measures = played.step, dict[str, Measure]()
        evaluations.decide(step)
        for policy in run.policies:
            make = partial(make_datums, run.folder, recipe, parts, policy.name)
            files = cache(partial(make, step, played.spans))
            measures[policy.name] = measure_of(policy, step, files, smallest)
            # Passes of `algorithm.loss` (tasks/algorithm/losses.py), and the optimizer's step.
            update_policy(
                run.folder.update(policy.name, step),
                policy.updater,
                StepUpdate(step, lambda made=files: made().trained(), spans=played.spans),
                meanwhile=(measures[policy.name], played.draw_next),
                next_update=played.next_update(make),
            )
        if step + 1 < run.end():
            run.policies.open_soon(step + 1)
        evaluations.go_on(step)
        record_step(run, step, measures, measure_parts(parts, step, played.spans))
    evaluations.end()


def make_datums(
    at: RunFolder,
    recipe: Recipe,
    parts: Sequence[StepPart],
    name: str,
    step: int,
    spans: Sequence[Path],
) -> StepFiles:
    """Make what the policy `name` is trained on at a step, from the rollouts' sealed batches.

    Prefect is told of the update that needs the files, and not of each of them.
    """
    query, credit, roles = recipe.algorithm.rewards, recipe.credit(), recipe.policies()[name]
    verdicts = next(filter(None, (part.verdicts(step, spans) for part in parts)), None)
    trajectories = assemble_trajectories.make(at.trajectories(name, step), spans, roles)
    rewards = compute_rewards.make(at.rewards(name, step), trajectories, query, verdicts)
    read = [part.logprobs(name, step, spans, trajectories) for part in parts]
    logprobs = {source: path for of_part in read for source, path in of_part.items()}
    # Rewards become advantages, by `algorithm.advantage` (tasks/algorithm/advantages.py).
    datums = build_datums.make(at.datums(name, step), trajectories, rewards, credit, logprobs)
    beside = [path for part in parts for path in part.datums(name, step)]
    return StepFiles(spans, trajectories, logprobs, datums, verdicts=verdicts, beside=beside)
