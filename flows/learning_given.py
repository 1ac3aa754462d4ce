"""The loop of a run that learns what it is given, and plays nothing: texts, or pairs.

The policy's answers are not asked, so that the datums of a step do not depend on the update before
it: an update is submitted beside the result of the one before.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from adapters.calls import POLICY
from flows.recipe.given_examples import GivenRecipe
from flows.runtime.by_policy import record_step, update
from flows.runtime.checks import check_start
from flows.runtime.flow_runs import RunSummary, completed, name_of_run, summarize_run
from flows.runtime.open_run import OpenRun, open_run
from tasks.given.given import Given, bind_given, draw_given, score_given
from tasks.metrics import StepFiles
from tasks.reports.artifacts import Artifacts
from tasks.storage.run_folder import folder_of
from tasks.updates import PlannedUpdate

R = TypeVar("R", bound=GivenRecipe)


def learn_given(recipe: R, run: str | None, have_read: Callable[[OpenRun, R], None]) -> RunSummary:
    """Train a run on what it is given, once another policy, if its recipe has one, has read it."""
    run = run or name_of_run()
    recipe = check_start(recipe, folder_of(run))
    with open_run(recipe, run) as opened, Artifacts(opened.folder, recipe.steps) as artifacts:
        given = recipe.units(opened.folder)
        with opened.beginning():
            chat = opened.chat(recipe.model)
            bind_given(given.path, given, recipe.given_examples(), chat, recipe.dataset)
        have_read(opened, recipe)
        learn(opened, recipe, given, artifacts)
        artifacts.publish()
    summary = summarize_run(opened.folder)
    return completed(summary, summary.outcome)


def learn(run: OpenRun, recipe: GivenRecipe, given: Given, artifacts: Artifacts) -> None:
    """Train the policy of a run on the units of each step, and score what is due."""
    drawing, at = recipe.drawing(), run.folder.datums
    left, saves_state = run.steps_left(), partial(recipe.checkpoints.due, steps=recipe.steps)

    def draw(step: int) -> Path | None:
        return draw_given(at(POLICY, step), given, drawing, step) if step in left else None

    run.tracking.follow()
    score(run, recipe, given, left.start)
    following = draw(left.start)
    for step in left:
        drawn, following = following, draw(step + 1)
        assert drawn is not None, "each step that is left is drawn"
        if following is not None:
            planned = PlannedUpdate(step + 1, [following], saves_state(step + 2))
            run.policies.main.updater.plan(planned)
        datums = {POLICY: drawn}
        updates = update(run, step, [datums], with_state=saves_state(step + 1))
        if step == 0:
            given.check_first(updates[POLICY], recipe.checkpoints.probe_tolerance)
        score(run, recipe, given, step + 1)
        files = StepFiles([], {}, {}, datums, updates, run.folder.measure(step + 1))
        artifacts.show(step, record_step(run, step, files, known=given.measure(drawn)))


def score(run: OpenRun, recipe: GivenRecipe, given: Given, step: int) -> None:
    """Measure checkpoint `step` on held-out units, if it is due."""
    evaluation = recipe.evaluation
    if recipe.holds_out() and evaluation.due(step, recipe.steps):
        policy = run.policies.main.updater.sampler(step)
        drawn = evaluation.examples, evaluation.drawn_by(recipe.seed)
        score_given(run.folder.measure(step), given, policy, *drawn)
