"""The loop of a run that learns from given texts or pairs, and plays nothing.

The datums of a step do not depend on the update before it, since nothing is sampled. An update is
submitted before the result of the previous one has come.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from ratchet.adapters.calls import POLICY
from ratchet.flows.opening.checks import check_start
from ratchet.flows.opening.flow_runs import RunSummary, end_run, name_of_run
from ratchet.flows.opening.run import OpenRun, open_run
from ratchet.flows.opening.step_records import EarlyEnd, begin_steps, measure_of, record_step
from ratchet.flows.recipe.given_examples import GivenRecipe
from ratchet.tasks.given.given import Given, bind_given, draw_given, score_given
from ratchet.tasks.metrics import StepFiles
from ratchet.tasks.storage.run_folder import folder_of
from ratchet.tasks.updates import StepUpdate, update_policy

R = TypeVar("R", bound=GivenRecipe)


def learn_given(recipe: R, run: str | None, have_read: Callable[[OpenRun, R], None]) -> RunSummary:
    """Train a run on texts or pairs; `have_read` has a teacher or a reference read them first."""
    run = run or name_of_run()
    recipe = check_start(recipe, folder_of(run))
    with open_run(recipe, run) as opened:
        given = recipe.units(opened.folder)
        with opened.beginning():
            chat = opened.chat(recipe.model)
            bind_given(given.path, given, recipe.given_examples(), chat, recipe.dataset)
        have_read(opened, recipe)
        learn(opened, recipe, given)
    return end_run(opened.folder)


def learn(run: OpenRun, recipe: GivenRecipe, given: Given) -> None:
    """Train the policy of a run on the units of each step, and score what is due."""
    drawing, left, updater = recipe.drawing(), run.steps_left(), run.policies.main.updater
    begin_steps(run)

    def draw(step: int) -> Path:
        return draw_given.make(run.folder.datums(POLICY, step), given, drawing, step)

    early_end = EarlyEnd(recipe, run.folder)
    score(run, recipe, given, left.start)
    early_end.look(left.start)
    for step in left:
        datums, ahead = draw(step), step + 1 < run.end()
        next_update = StepUpdate(step + 1, partial(list, [draw(step + 1)])) if ahead else None
        path, update = run.folder.update(POLICY, step), StepUpdate(step, partial(list, [datums]))
        updated = update_policy(path, updater, update, next_update=next_update)
        if step == 0:
            given.check_first(updated, updater.probe_tolerance)
        score(run, recipe, given, step + 1)
        early_end.look(step + 1)
        files = partial(StepFiles, [], None, {}, datums, run.folder.measure(step + 1))
        measure = measure_of(run.policies.main, step, files)
        record_step(run, step, {POLICY: measure}, given.measure(datums))


def score(run: OpenRun, recipe: GivenRecipe, given: Given, step: int) -> None:
    """Measure checkpoint `step` on held-out units, if it is due."""
    evaluation = recipe.evaluation
    if recipe.holds_out() and evaluation.due(step, run.end()):
        policy = run.policies.main.updater.sampler(step)
        drawn = evaluation.examples, evaluation.drawn_by(recipe.seed)
        score_given(run.folder.measure(step), given, policy, *drawn)
