"""Train a policy by supervised learning: it learns to write given texts.

Each step draws texts in a seeded order, and takes one optimizer step on the cross-entropy of their
trained tokens. The texts are made tokens once, when the run begins, exactly as the door would have
recorded them. The loss on held-out texts, and not a reward, says what was learnt.
"""

from prefect import flow

from adapters.calls import POLICY
from flows.recipe.finetuning import FinetuneRecipe
from flows.runtime.by_policy import record_step, update
from flows.runtime.checks import check_start
from flows.runtime.flow_runs import (
    RunSummary,
    again_if_engine_dies,
    completed,
    name_of_run,
    summarize_run,
)
from flows.runtime.open_run import OpenRun, open_run
from tasks.metrics import StepFiles
from tasks.reports.artifacts import Artifacts
from tasks.storage.run_folder import folder_of
from tasks.texts.batches import draw_texts, measure_texts
from tasks.texts.held_out import score_texts
from tasks.texts.source import Texts, bind_texts


@flow(name="finetune", flow_run_name=name_of_run)
@again_if_engine_dies
def finetune(recipe: FinetuneRecipe, run: str | None = None) -> RunSummary:
    """Train a model on texts.

    Args:
        recipe: Everything the run depends on.
        run: Its name, a folder under runs/; a run that exists continues where it stopped.
    """
    run = run or name_of_run()
    recipe = check_start(recipe, folder_of(run))
    with open_run(recipe, run) as opened, Artifacts(opened.folder, recipe.steps) as artifacts:
        with opened.beginning():
            sources, chat = recipe.given_examples(), opened.chat(recipe.model)
            texts = Texts(bind_texts(opened.folder.texts, sources, chat, recipe.rules()))
        learn(opened, recipe, texts, artifacts)
        artifacts.publish()
    summary = summarize_run(opened.folder)
    return completed(summary, summary.outcome)


def learn(run: OpenRun, recipe: FinetuneRecipe, texts: Texts, artifacts: Artifacts) -> None:
    """Train the policy of a run on the texts of each step, and score what is due."""
    batch, method = recipe.batches(), recipe.optimizer.method(recipe.loss, {}, recipe.steps)
    run.tracking.follow()
    score(run, recipe, texts, run.steps_left().start)
    for step in run.steps_left():
        datums = {POLICY: draw_texts(run.folder.datums(POLICY, step), texts, batch, step)}
        saves_state = recipe.checkpoints.due(step + 1, recipe.steps)
        updates = update(run, step, [datums], method, with_state=saves_state)
        score(run, recipe, texts, step + 1)
        files = StepFiles([], {}, {}, datums, updates, run.folder.measure(step + 1))
        known = measure_texts(texts, datums[POLICY])
        artifacts.show(step, record_step(run, step, files, known=known))


def score(run: OpenRun, recipe: FinetuneRecipe, texts: Texts, step: int) -> None:
    """Measure the loss of checkpoint `step` on held-out texts, if it is due."""
    evaluation = recipe.evaluation
    if evaluation.due(step, recipe.steps):
        policy = run.policies.main.updater.sampler(step)
        score_texts(run.folder.measure(step), texts, policy, evaluation.examples, recipe.seed)
