"""Train a policy by reinforcement learning on an agent's own rollouts.

Each step compares the rollouts of one example with each other (group-relative advantages, as
`algorithm.advantage` says), weighs every sampled token by the advantage of its call, and takes one
optimizer step on `algorithm.loss`. There is no value network and no reference model, and sampling
is on-policy: step k is sampled by the weights after k updates.
"""

from prefect import flow

from flows.recipe import Recipe
from flows.runtime.by_policy import assemble, build, record_step, update
from flows.runtime.evaluation import evaluate_checkpoint
from flows.runtime.open_run import name_of_run, open_run, train_split, training_sampling
from flows.runtime.run_summary import RunSummary, summarize_run
from flows.runtime.task_runner import task_runner
from tasks.metrics import StepFiles
from tasks.reports.artifacts import Progress, publish
from tasks.shards import draw_shard
from tasks.storage.run_folder import shard_name


@flow(name="train", flow_run_name=name_of_run)
def train(recipe: Recipe, run: str | None = None) -> RunSummary:
    """Train the model behind an agent.

    Args:
        recipe: Everything the run depends on.
        run: Its name, a folder under runs/; a run that exists continues where it stopped.
    """
    source, sampling, rollouts = train_split(recipe), training_sampling(recipe), recipe.rollouts
    credit, method = recipe.credit(), recipe.update_method()
    with open_run(recipe, run or name_of_run()) as opened, task_runner(rollouts) as runner:
        folder, progress = opened.folder, Progress(opened.folder, recipe.steps)
        for step in opened.steps_left():
            if recipe.evaluation.due(step, recipe.steps):
                evaluate_checkpoint(recipe, opened, runner, step)
            shard = draw_shard(
                folder.shard(shard_name("train", step)),
                source,
                recipe.seed,
                step,
                rollouts.groups,
                rollouts.batches,
            )
            spans = runner.play_shard(
                opened, shard, step, sampling, rollouts.group_size, rollouts.attempts
            )
            trajectories = assemble(opened, step, spans)
            datums = build(opened, step, trajectories, credit)
            saves_state = recipe.checkpoints.due(step + 1, recipe.steps)
            updates = update(opened, step, datums, method, with_state=saves_state)
            files = StepFiles([batch.result() for batch in spans], trajectories, datums, updates)
            progress.show(step, record_step(opened, step, files, credit.min_group_size))
        evaluate_checkpoint(recipe, opened, runner, recipe.steps)
        publish(folder)
    return summarize_run(folder)
