"""replay: train anew from the rollouts that a run has recorded, under another algorithm."""

from prefect import flow
from prefect.runtime import flow_run

from flows.recipe import Recipe
from flows.runtime.forks import replay_run
from flows.runtime.open_run import opened
from flows.runtime.run_summary import Outcome, outcome_of
from flows.runtime.scoring import score
from tasks.metrics import Metrics
from tasks.reports.artifacts import Progress, publish
from tasks.stages import (
    assemble_trajectories,
    build_datums,
    measure_step,
    record_step,
    update_policy,
)
from tasks.storage.run_folder import exists, folder_of


@flow(name="replay")
def replay(recipe: Recipe, parent: str, run: str | None = None) -> Outcome:
    """Train on recorded rollouts; nothing is sampled but the last checkpoint's evaluation.

    The further the weights move from those that sampled, the more the importance weights must
    correct: metrics `kl_sample_train_…` say by how much, step by step.

    Args:
        recipe: The parent's, with another algorithm, optimizer or evaluation.
        parent: The run whose rollouts are trained on.
        run: The new run's name, a folder under runs/; one that exists continues where it stopped.
    """
    name = run or f"{parent}-replay-{flow_run.id[:8]}"
    if not exists(folder_of(name)):
        values = recipe.model_dump(mode="json")
        replay_run(folder_of(parent), name, values, recipe.fingerprint())
    algorithm, steps = recipe.algorithm, recipe.steps
    smallest = recipe.rollouts.smallest_group()
    weighing = algorithm.advantage, algorithm.normalise, smallest, algorithm.discount
    with opened(recipe, name, on_policy=False) as parts:
        folder, progress = parts.folder, Progress(parts.folder, steps)
        for step in range(parts.steps_done(), steps):
            saves = recipe.checkpoints.due(step + 1, steps)
            spans = folder / "spans" / f"train-{step:05d}.parquet"
            metrics: Metrics = {}
            for policy in parts.policies:
                own, roles = policy.folder, policy.roles
                trajectories = assemble_trajectories(own, step, spans, roles)
                datums = build_datums(own, step, trajectories, *weighing)
                before = policy.ledger.at(step)
                update = update_policy(own, step, policy.learner, before, datums, saves)
                made = trajectories, datums, update
                metrics |= measure_step(policy.name, spans, *made, smallest, roles, sampled=False)
            record_step(folder, step, metrics)
            parts.tracker.log(metrics, step)
            progress.show(step, metrics)
        score(recipe, parts, parts.ledger.at(steps))
        publish(folder)
    return outcome_of(folder)
