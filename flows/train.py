"""Train a policy by reinforcement learning on an agent's own rollouts.

Each step compares the rollouts of one example with each other (group-relative advantages, as
`algorithm.advantage` says), weighs every sampled token by the advantage of its call, and takes one
optimizer step on `algorithm.loss`. There is no value network, and no reference policy unless
`algorithm.kl` has a coefficient. Step s is sampled by the weights after s updates or, with
`rollouts.lag`, after exactly that many fewer; by `rollouts.order`, steps may be made of batches as
they arrive instead.
"""

from collections.abc import Mapping

from prefect import flow

from flows.recipe.recipe import Recipe
from flows.runtime.by_policy import accumulate, assemble, build, record_step, refer, update
from flows.runtime.evaluation import HeldOutEvaluations
from flows.runtime.open_run import (
    again_if_engine_dies,
    name_of_run,
    open_run,
    train_split_at,
)
from flows.runtime.overlap import iterate_steps
from flows.runtime.run_summary import RunSummary, complete, summarize_run
from flows.runtime.task_runner import (
    CheckpointOf,
    Spans,
    task_runners,
    training_groups,
    wait_for_batches,
)
from tasks.metrics import StepFiles
from tasks.reports.artifacts import Artifacts
from tasks.shards import ShardSize, draw_shard
from tasks.storage.run_folder import shard_name


@flow(name="train", flow_run_name=name_of_run)
@again_if_engine_dies
def train(recipe: Recipe, run: str | None = None) -> RunSummary:
    """Train the model behind an agent.

    Args:
        recipe: Everything the run depends on.
        run: Its name, a folder under runs/; a run that exists continues where it stopped.
    """
    rollouts, credit, method = recipe.rollouts, recipe.credit(), recipe.update_method()
    size = ShardSize(rollouts.groups, rollouts.batches, rollouts.rounds)
    played = training_groups(recipe)
    with (
        open_run(recipe, run or name_of_run()) as opened,
        task_runners(rollouts, opened, played) as runners,
        Artifacts(opened.folder, recipe.steps) as artifacts,
    ):
        folder = opened.folder
        evaluations = HeldOutEvaluations(recipe, opened, runners.evaluation)

        def sample(step: int, checkpoint: CheckpointOf, number: int) -> Mapping[str, Spans]:
            path, seed = folder.shard(shard_name("train", step)), recipe.seed
            shard = draw_shard(path, train_split_at(recipe, folder, step), seed, step, size)
            return runners.training.submit_shard(opened, shard, checkpoint, played, number)

        for step, batches in iterate_steps(opened, rollouts, sample, credit.trained_calls):
            evaluations.submit_due(step)
            if method.by_batch:
                accumulate(opened, step, batches, credit, method)
            spans = wait_for_batches(batches)
            trajectories = assemble(opened, step, spans)
            references = refer(opened, step, trajectories)
            datums = build(opened, step, trajectories, references, credit)
            saves_state = recipe.checkpoints.due(step + 1, recipe.steps)
            updates = update(opened, step, datums, method, with_state=saves_state)
            evaluations.score(step - rollouts.lag)
            files = StepFiles(
                [batch.result() for batch in spans], trajectories, references, datums, updates
            )
            artifacts.show(step, record_step(opened, step, files, credit.min_group_size))
        evaluations.submit_due(recipe.steps)
        evaluations.score(recipe.steps)
        artifacts.publish()
    summary = summarize_run(folder)
    return complete(summary, summary.outcome)
