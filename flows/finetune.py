"""Train a policy by supervised learning: it learns to write given texts.

Each step draws texts in a seeded order, and takes one optimizer step on the cross-entropy of their
trained tokens, or on the divergence from a teacher's likeliest tokens at their places. The texts
are made tokens once, when the run begins, exactly as the door would have recorded them, and the
teacher is asked once, too. The loss on held-out texts, and not a reward, says what was learnt.
"""

from pathlib import Path

from prefect import flow

from adapters.calls import POLICY
from flows.recipe.finetuning import FinetuneRecipe
from flows.runtime.bound_checkpoints import open_teacher
from flows.runtime.checks import check_start
from flows.runtime.flow_runs import RunSummary, again_if_engine_dies, end_run, name_of_run
from flows.runtime.open_run import OpenRun, open_run, record_step
from flows.runtime.overlap import with_following
from tasks.metrics import StepFiles
from tasks.reports.artifacts import Artifacts
from tasks.storage.files import is_written
from tasks.storage.run_folder import folder_of
from tasks.texts.batches import draw_texts, measure_texts
from tasks.texts.held_out import score_taught, score_texts
from tasks.texts.source import Texts, bind_texts
from tasks.texts.teacher import LongerTexts, ask_teacher
from tasks.updates import update_policy


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
        learn(opened, recipe, bind(opened, recipe), artifacts)
        artifacts.publish()
    return end_run(opened.folder)


def bind(run: OpenRun, recipe: FinetuneRecipe) -> Texts:
    """Bind a run to its texts as tokens, and to what its teacher finds likeliest in them."""
    folder, teacher = run.folder, recipe.teacher
    with run.beginning():
        chat, rules = run.chat(recipe.model), recipe.rules()
        path = bind_texts(folder.texts, recipe.given_examples(), chat, rules)
    if teacher.model is None:
        return Texts(path)
    texts = Texts(path, folder.text_teacher)
    if not all(map(is_written, texts.parts())):
        read = recipe.read_by_teacher() if teacher.reads else None
        longer = None if read is None else LongerTexts(read, chat, rules.trained)
        with open_teacher(recipe, folder, run.service) as asked:
            ask_teacher(texts, asked, teacher.top_k, longer)
    return texts


def learn(run: OpenRun, recipe: FinetuneRecipe, texts: Texts, artifacts: Artifacts) -> None:
    """Train the policy of a run on the texts of each step, and score what is due."""
    batch, left, updater = recipe.batches(), run.steps_left(), run.policies.main.updater

    def draw(step: int) -> Path:
        return draw_texts(run.folder.datums(POLICY, step), texts, batch, step)

    run.tracking.follow()
    score(run, recipe, texts, left.start)
    for step, datums, following in with_following(left, draw):
        if following is not None:
            updater.plan(step + 1, [following])
        update_policy(run.folder.update(POLICY, step), updater, step, [datums])
        score(run, recipe, texts, step + 1)
        files = StepFiles([], None, {}, datums, run.folder.measure(step + 1))
        known = measure_texts(texts, datums)
        artifacts.show(step, record_step(run, step, {POLICY: files}, known=known))


def score(run: OpenRun, recipe: FinetuneRecipe, texts: Texts, step: int) -> None:
    """Measure the loss of checkpoint `step` on held-out texts, if it is due."""
    evaluation = recipe.evaluation
    if recipe.holds_out() and evaluation.due(step, recipe.steps):
        policy = run.policies.main.updater.sampler(step)
        path, divergence = run.folder.measure(step), recipe.divergence()
        drawn = texts, policy, evaluation.examples, evaluation.drawn_by(recipe.seed)
        if divergence is None:
            score_texts(path, *drawn)
        else:
            score_taught(path, *drawn, divergence)
