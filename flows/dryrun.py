"""Play a handful of examples through everything but the update."""

from dataclasses import replace

from prefect import flow

from flows.dry_runs import DryRun
from flows.recipe.recipe import Recipe
from flows.runtime.bound_checkpoints import open_references
from flows.runtime.by_policy import assemble, build, conclude, refer, reward
from flows.runtime.checks import check_start
from flows.runtime.flow_runs import name_of_run
from flows.runtime.open_rollouts import (
    judge_groups,
    open_rollouts,
    training_groups,
    wait_for_batches,
)
from flows.runtime.open_run import open_run
from tasks.evaluations import score_spans
from tasks.reports.artifacts import Artifacts
from tasks.reports.dryruns import LearnedFrom, describe
from tasks.settings.run import Model
from tasks.shards import ShardSize, draw_shard
from tasks.storage.names import shard_name
from tasks.storage.run_folder import folder_of


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
        open_references(recipe, opened.folder, opened.service) as others,
        Artifacts(opened.folder) as artifacts,
    ):
        artifacts.tag("dryrun")
        path = opened.folder.shard(shard_name("train", 0))
        size, source = ShardSize(recipe.rollouts.groups), recipe.train_split()
        shard = draw_shard(path, source, recipe.seed, 0, size)
        groups = replace(training_groups(recipe), quorum=1.0)
        spans = wait_for_batches(runners.evaluation.submit_shard(shard, 0, groups).values())
        trajectories = assemble(opened, 0, spans)
        verdicts = conclude(opened, 0, judge_groups(opened, recipe, 0, spans, runners.judging))
        rewards = reward(opened, 0, trajectories, recipe.algorithm.rewards, verdicts)
        references = refer(opened, 0, spans, trajectories, others)
        datums = build(opened, 0, trajectories, rewards, references, recipe.credit())
    learned = {
        name: LearnedFrom(trajectories[name], rewards[name], datums[name]) for name in datums
    }
    context, tiny = runners.chat.read_context, recipe.model.base == Model().base
    score = score_spans(spans, shard)
    return DryRun(
        rollouts=score.rollouts,
        failed=score.failed,
        report=describe(spans, learned, recipe.credit(), context, tiny=tiny),
    )
