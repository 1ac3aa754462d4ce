"""Train anew on the rollouts that a run has recorded, under another algorithm.

Nothing is sampled, so every step after the first is off-policy: the importance weights of the loss
correct for it, and metrics `kl_sample_train_…` measure it step by step.
"""

from prefect import flow

from flows.recipe.recipe import Recipe
from flows.runtime.by_policy import assemble, build, record_step, refer, update
from flows.runtime.evaluation import score, submit_held_out
from flows.runtime.forks import replay_run
from flows.runtime.open_run import again_if_engine_dies, name_of_run, open_run
from flows.runtime.run_summary import RunSummary, complete, summarize_run
from flows.runtime.task_runner import task_runners
from tasks.metrics import StepFiles
from tasks.reports.artifacts import Artifacts
from tasks.storage.arrivals import batches_of
from tasks.storage.run_folder import folder_of


@flow(name="replay", flow_run_name=name_of_run)
@again_if_engine_dies
def replay(recipe: Recipe, parent: str, run: str | None = None) -> RunSummary:
    """Train on recorded rollouts; only the last checkpoint's evaluation is sampled.

    Args:
        recipe: The parent's, with another algorithm, optimizer or evaluation.
        parent: The run whose rollouts are trained on.
        run: The new run's name, a folder under runs/; one that exists continues where it stopped.
    """
    name = run or name_of_run()
    if not folder_of(name).exists():
        replay_run(folder_of(parent), name, recipe.model_dump(mode="json"), recipe.fingerprint())
    credit, method = recipe.credit(), recipe.update_method()
    with (
        open_run(recipe, name, on_policy=False) as opened,
        task_runners(recipe.rollouts, opened) as runners,
        Artifacts(opened.folder, recipe.steps) as artifacts,
    ):
        folder = opened.folder
        for step in opened.steps_left():
            spans = [folder.spans(batch) for batch in batches_of(folder, step)]
            trajectories = assemble(opened, step, spans)
            references = refer(opened, step, trajectories)
            datums = build(opened, step, trajectories, references, credit)
            saves_state = recipe.checkpoints.due(step + 1, recipe.steps)
            updates = update(opened, step, datums, method, with_state=saves_state)
            files = StepFiles(spans, trajectories, references, datums, updates)
            metrics = record_step(opened, step, files, credit.min_group_size, sampled=False)
            artifacts.show(step, metrics)
        last = submit_held_out(recipe, opened, runners.evaluation, recipe.steps)
        score(recipe, opened, last.wait(), f"{recipe.steps:05d}")
        artifacts.publish()
    summary = summarize_run(folder)
    return complete(summary, summary.outcome)
