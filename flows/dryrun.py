"""Play a handful of examples through everything but the update."""

from dataclasses import replace

from prefect import flow

from flows.recipe.dry_runs import DryRun
from flows.recipe.recipe import Recipe
from flows.runtime.by_policy import assemble, build, refer
from flows.runtime.checks import train_split
from flows.runtime.open_run import name_of_run, open_run
from flows.runtime.task_runner import task_runners, training_groups, wait_for_batches
from tasks.evaluations import score_spans
from tasks.reports.dryruns import describe
from tasks.shards import ShardSize, draw_shard
from tasks.storage.run_folder import shard_name


@flow(name="dryrun", flow_run_name=name_of_run)
def dryrun(recipe: Recipe, run: str) -> DryRun:
    """Play the first step's examples with the untrained model, as far as datums.

    Args:
        recipe: How many examples, and how often each is played, is its `rollouts`.
        run: The name of the folder that is left, such as dryruns/hello.
    """
    rollouts = recipe.rollouts
    with open_run(recipe, run) as opened, task_runners(rollouts, opened) as runners:
        path = opened.folder.shard(shard_name("train", 0))
        size = ShardSize(rollouts.groups)
        shard = draw_shard(path, train_split(recipe), recipe.seed, 0, size)
        played = replace(training_groups(recipe), quorum=1.0)
        batches = runners.evaluation.submit_shard(opened, shard, lambda _: 0, played)
        trajectories = assemble(opened, 0, wait_for_batches(batches.values()))
        references = refer(opened, 0, trajectories)
        datums = build(opened, 0, trajectories, references, recipe.credit())
        chat = opened.rollouts.door.chat
    spans = [batch.result() for batch in batches.values()]
    score = score_spans(spans, shard)
    return DryRun(
        rollouts=score.rollouts,
        failed=score.failed,
        report=describe(spans, trajectories, datums, chat.read_context),
    )
