"""dryrun: a handful of examples through everything but the update."""

from prefect import flow

from flows.recipe import Recipe
from flows.runtime.dryrun_recipe import DryRun
from flows.runtime.open_run import opened, sampled, train_split
from tasks.evaluations import score_spans
from tasks.reports.dryruns import describe
from tasks.stages import assemble_trajectories, build_datums, collect_rollouts, draw_shard
from tasks.storage.run_folder import policy_folder


@flow(name="dryrun")
def dryrun(recipe: Recipe, run: str) -> DryRun:
    """Play the first step's examples with the untrained model, as far as datums.

    Args:
        recipe: How many examples, and how often each is played, is its `rollouts`.
        run: The name of the folder that is left, such as dryruns/hello.
    """
    algorithm, rollouts, batch = recipe.algorithm, recipe.rollouts, "train-00000"
    with opened(recipe, run) as parts:
        folder = parts.folder
        shard = draw_shard(folder, batch, train_split(recipe), recipe.seed, 0, rollouts.groups)
        spans = collect_rollouts(
            folder,
            batch,
            parts.runner,
            shard,
            parts.ledger.at(0),
            rollouts.group_size,
            sampled(recipe),
            rollouts.attempts,
        )
    smallest = rollouts.smallest_group()
    weighing = algorithm.advantage, algorithm.normalise, smallest, algorithm.discount
    made = {}
    for name, roles in recipe.policies().items():
        own = policy_folder(folder, name)
        trajectories = assemble_trajectories(own, 0, spans, roles)
        made[name] = trajectories, build_datums(own, 0, trajectories, *weighing)
    score = score_spans(spans, shard)
    return DryRun(
        rollouts=score.rollouts,
        failed=score.failed,
        report=describe(spans, made),
    )
