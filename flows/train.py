"""train: the whole path. One optimizer step a shard, each from the checkpoint the last one left."""

from prefect import flow
from prefect.runtime import flow_run

from flows.recipe import Recipe
from flows.runtime.open_run import opened, sampled, train_split
from flows.runtime.run_summary import Outcome, outcome_of
from flows.runtime.scoring import score
from tasks.metrics import Metrics
from tasks.reports.artifacts import Progress, publish
from tasks.stages import (
    assemble_trajectories,
    build_datums,
    collect_rollouts,
    draw_shard,
    measure_step,
    record_step,
    update_policy,
)
from tasks.storage.run_folder import named


@flow(name="train")
def train(recipe: Recipe, run: str | None = None) -> Outcome:
    """Train the model behind an agent.

    Args:
        recipe: Everything the run depends on.
        run: Its name, a folder under runs/; a run that exists continues where it stopped.
    """
    source, sampling, steps = train_split(recipe), sampled(recipe), recipe.steps
    rollouts, algorithm = recipe.rollouts, recipe.algorithm
    smallest = rollouts.smallest_group()
    weighing = algorithm.advantage, algorithm.normalise, smallest, algorithm.discount
    with opened(recipe, run or named(recipe.agent, flow_run.id[:8])) as parts:
        folder, runner, ledger = parts.folder, parts.runner, parts.ledger
        progress = Progress(folder, steps)
        for step in range(parts.steps_done(), steps):
            checkpoint = ledger.at(step)
            if recipe.evaluation.due(step, steps):
                score(recipe, parts, checkpoint)
            batch, saves = f"train-{step:05d}", recipe.checkpoints.due(step + 1, steps)
            shard = draw_shard(folder, batch, source, recipe.seed, step, rollouts.groups)
            spans = collect_rollouts(
                folder,
                batch,
                runner,
                shard,
                checkpoint,
                rollouts.group_size,
                sampling,
                rollouts.attempts,
            )
            metrics: Metrics = {}
            for policy in parts.policies:
                own, roles = policy.folder, policy.roles
                trajectories = assemble_trajectories(own, step, spans, roles)
                datums = build_datums(own, step, trajectories, *weighing)
                before = policy.ledger.at(step)
                update = update_policy(own, step, policy.learner, before, datums, saves)
                made = trajectories, datums, update
                metrics |= measure_step(policy.name, spans, *made, smallest, roles)
            record_step(folder, step, metrics)
            parts.tracker.log(metrics, step)
            progress.show(step, metrics)
        score(recipe, parts, ledger.at(steps))
        publish(folder)
    return outcome_of(folder)
