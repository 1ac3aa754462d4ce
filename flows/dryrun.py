"""Play a handful of examples through everything but the update."""

from dataclasses import replace

from prefect import flow
from pydantic import BaseModel

from flows.recipe.recipe import Recipe
from flows.runtime.bound_checkpoints import open_references
from flows.runtime.checks import check_start
from flows.runtime.extras import Extras
from flows.runtime.flow_runs import name_of_run
from flows.runtime.open_rollouts import open_rollouts, training_groups
from flows.runtime.open_run import open_run
from tasks.datums import build_datums
from tasks.evaluations import score_spans
from tasks.reports.dryruns import LearnedFrom, describe_dryrun
from tasks.rewards import compute_rewards
from tasks.settings.run import Model
from tasks.shards import ShardSize, draw_shard
from tasks.storage.names import shard_name
from tasks.storage.run_folder import folder_of
from tasks.tracking.prefect_pages import publish_tag
from tasks.trajectories import assemble_trajectories


class DryRun(BaseModel, frozen=True):
    """Numbers of a dry run's rollouts, and its report as text."""

    rollouts: int
    failed: int
    report: str


@flow(name="dryrun", flow_run_name=name_of_run)
def dryrun(recipe: Recipe, run: str) -> DryRun:
    """Play the first step's examples with the untrained model, as far as datums.

    Args:
        recipe: How many examples, and how often each is played, is its `rollouts`.
        run: The name of the folder that is left, such as dryruns/hello.
    """
    recipe = check_start(recipe, folder_of(run))
    with (
        open_run(recipe, run) as opened,
        open_rollouts(opened, recipe) as runners,
        open_references(recipe, opened.folder, opened.service) as references,
    ):
        at, source = opened.folder, recipe.train_split()
        size, path = ShardSize(recipe.rollouts.groups), at.shard(shard_name("train", 0))
        shard = draw_shard(path, source, recipe.seed, 0, size)
        groups = replace(training_groups(recipe), quorum=1.0)
        runner = replace(runners.evaluation, check=lambda _: None)  # what fails is shown
        spans = runner.wait_for(runner.submit_shard(shard, 0, groups).values())
        extras = Extras(opened, recipe, runners.judging, references)
        learned, verdicts = dict[str, LearnedFrom](), extras.verdicts(0, spans)
        for policy in opened.policies:
            name, query = policy.name, recipe.algorithm.rewards
            trajectories = assemble_trajectories(at.trajectories(name, 0), spans, policy.roles)
            rewards = compute_rewards(at.rewards(name, 0), trajectories, query, verdicts)
            logprobs = extras.logprobs(policy, 0, spans, trajectories)
            datums = build_datums(
                at.datums(name, 0), trajectories, rewards, recipe.credit(), logprobs
            )
            learned[name] = LearnedFrom(trajectories, rewards, datums)
    context, tiny = runners.chat.read_context, recipe.model.base == Model().base
    score = score_spans(spans, shard)
    publish_tag("dryrun")
    return DryRun(
        rollouts=score.rollouts,
        failed=score.failed,
        report=describe_dryrun(spans, learned, recipe.credit(), context, tiny=tiny),
    )
