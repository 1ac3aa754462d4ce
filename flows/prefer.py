"""Train a policy on preferences: it learns which of two answers to prefer.

Each step draws pairs in a seeded order, and takes one optimizer step on the loss that `preference`
names, a function of the log-probabilities of each pair's two sides. A reference that never changes
scores every side once, when the run begins. How often held-out pairs are compared as they should
be, and not a reward, says what was learnt.
"""

from pathlib import Path

from prefect import flow

from adapters.calls import POLICY
from flows.recipe.algorithm import BASE
from flows.recipe.preferring import START, PreferRecipe
from flows.runtime.bound_checkpoints import read_bound
from flows.runtime.checks import check_start
from flows.runtime.flow_runs import RunSummary, again_if_engine_dies, end_run, name_of_run
from flows.runtime.open_run import OpenRun, open_run, record_step
from flows.runtime.overlap import with_following
from tasks.metrics import StepFiles
from tasks.pairs.batches import draw_pairs
from tasks.pairs.held_out import check_reference, score_pairs
from tasks.pairs.source import BoundPairs, bind_pairs, score_references
from tasks.references import Reference
from tasks.reports.artifacts import Artifacts
from tasks.storage.files import is_written
from tasks.storage.run_folder import folder_of
from tasks.updates import update_policy


@flow(name="prefer", flow_run_name=name_of_run)
@again_if_engine_dies
def prefer(recipe: PreferRecipe, run: str | None = None) -> RunSummary:
    """Train a model on pairs of answers, of which one is preferred.

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


def bind(run: OpenRun, recipe: PreferRecipe) -> BoundPairs:
    """Bind a run to its pairs as tokens, and to what the reference gives them, if there is one."""
    folder, method = run.folder, recipe.preference
    with run.beginning():
        chat, rules = run.chat(recipe.model), recipe.rules()
        path = bind_pairs(folder.pairs, recipe.given_examples(), chat, rules, method.loss)
    if not method.row().reference:
        return BoundPairs(path)
    scored = folder.pair_references
    if not is_written(scored):
        score_references(scored, path, open_reference(run, recipe), folder.reference_parts)
    return BoundPairs(path, scored)


def open_reference(run: OpenRun, recipe: PreferRecipe) -> Reference:
    """Return the policy that a run's loss compares with, which is never the one that is trained."""
    preference = recipe.preference
    if preference.reference == BASE:
        return run.service.base_sampler(recipe.model.base)
    if preference.names_checkpoint():
        bound = read_bound(run.folder, preference.reference)
        return run.service.sampler(bound.of(POLICY).sampler)
    return run.policies.main.updater.sampler(0)


def learn(run: OpenRun, recipe: PreferRecipe, pairs: BoundPairs, artifacts: Artifacts) -> None:
    """Train the policy of a run on the pairs of each step, and score what is due."""
    preference, batch = recipe.preference, recipe.batches()
    left, updater = run.steps_left(), run.policies.main.updater

    def draw(step: int) -> Path:
        return draw_pairs(run.folder.datums(POLICY, step), pairs, batch, step)

    run.tracking.follow()
    score(run, recipe, pairs, left.start)
    for step, datums, following in with_following(left, draw):
        if following is not None:
            updater.plan(step + 1, [following])
        updated = update_policy(run.folder.update(POLICY, step), updater, step, [datums])
        if step == 0 and preference.row().reference and preference.reference == START:
            check_reference(updated, recipe.checkpoints.probe_tolerance)
        score(run, recipe, pairs, step + 1)
        files = StepFiles([], None, {}, datums, run.folder.measure(step + 1))
        artifacts.show(step, record_step(run, step, {POLICY: files}))


def score(run: OpenRun, recipe: PreferRecipe, pairs: BoundPairs, step: int) -> None:
    """Measure how checkpoint `step` compares held-out pairs, if it is due."""
    evaluation, preference = recipe.evaluation, recipe.preference
    if recipe.holds_out() and evaluation.due(step, recipe.steps):
        policy = run.policies.main.updater.sampler(step)
        loss, path = (preference.loss, preference.loss_settings), run.folder.measure(step)
        seed = evaluation.drawn_by(recipe.seed)
        score_pairs(path, pairs, policy, loss, evaluation.examples, seed)
