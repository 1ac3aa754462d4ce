"""Commands on runs that ended early: each takes the run as finished, with the steps it has."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from ratchet.adapters.errors import UserError
from ratchet.flows.checkpoints.forks import fork_run, replay_run
from ratchet.flows.cli.commands import app
from ratchet.flows.compare import compare
from ratchet.flows.evaluate import evaluate
from ratchet.flows.opening.checks import is_complete
from ratchet.flows.opening.evaluation import EarlyEnd
from ratchet.flows.opening.flow_runs import RunSummary
from ratchet.flows.recipe.plan import SweepRecipe
from ratchet.flows.recipe.recipe import Recipe
from ratchet.flows.replay import replay
from ratchet.flows.sweep import sweep
from ratchet.flows.train import train
from ratchet.tasks.evaluations import ScoredRollout, score_outcomes
from ratchet.tasks.recording.scores import read_evaluation
from ratchet.tasks.recording.step_log import read_metrics
from ratchet.tasks.reports.page import write_report
from ratchet.tasks.reports.verification import find_damage
from ratchet.tasks.storage.files import write_json
from ratchet.tasks.storage.owners import last_owner
from ratchet.tasks.storage.plan_record import child_runs, read_plan
from ratchet.tasks.storage.run_folder import RunError, RunFolder, folder_of
from tests.support.runs.recorded import RecordedRun
from tests.support.runs.small_recipe import ALWAYS, stopping

pytestmark = pytest.mark.usefixtures("prefect_server", "no_tinker")

RECIPE = stopping({"when": ALWAYS}, rollouts={"lag": 1})
"""Checkpoint 0 decides that the run ends at 3 of 6 steps; 0, 2 and 3 are measured."""


@pytest.fixture(scope="module")
def early(root: Path, recorded_run: RecordedRun) -> RunFolder:
    return recorded_run(RECIPE, "early")


@pytest.fixture(scope="module")
def forked(early: RunFolder) -> RunSummary:
    """Summary of a fork at step 1, of which checkpoint 2 decides: it ends at 5 of 6 steps."""
    fork(early, "forked", 1, RECIPE)
    return train(RECIPE, run="forked")


def fork(parent: RunFolder, name: str, step: int, recipe: Recipe) -> RunFolder:
    return fork_run(parent, name, step, recipe.model_dump(mode="json"), recipe.fingerprint())


def call(*words: str) -> str:
    """Return what a command has printed, which has ended well."""
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    return done.output


def test_the_list_of_runs_and_the_report_say_that_it_ended_early(early: RunFolder) -> None:
    (line,) = [line for line in call("runs").splitlines() if line.startswith("early ")]
    assert "3/3" in line
    assert "finished early" in line
    page = write_report([early], early.report).read_text()
    assert "3 of 6 steps of the agent hello" in page
    assert "ended early after checkpoint 0: held_out/reward/mean" in page


def test_it_is_as_it_was_written(early: RunFolder) -> None:
    assert "is as it was written" in call("verify", early.name)


def test_a_resume_makes_its_end_again_and_trains_no_further_step(early: RunFolder) -> None:
    before, end = early.metrics.read_bytes(), early.end.read_bytes()
    early.end.unlink()
    train(RECIPE, run="early")
    assert (early.metrics.read_bytes(), early.end.read_bytes()) == (before, end)
    assert early.sealed("train-00003") == []


@pytest.mark.story
def test_its_newest_and_its_best_checkpoint_are_evaluated_and_compared(early: RunFolder) -> None:
    newest = evaluate(RECIPE, run="early")
    assert newest.file == early.evaluation("00003")
    scores = {
        step: read_evaluation(early.evaluation(f"{step:05d}"))["sampled"].finished.mean or 0.0
        for step in (0, 2, 3)
    }
    best = max(scores, key=lambda step: scores[step])
    assert evaluate(RECIPE, model="early@best").file == early.evaluation(f"{best:05d}")
    compared = compare(RECIPE, ["early@0", "early"])
    assert [target.step for target in compared.targets] == [0, 3]


def test_its_last_checkpoint_is_exported(early: RunFolder, tmp_path: Path) -> None:
    assert f"{tmp_path / 'out'} has early@3" in call("export", "early", "--out", f"{tmp_path}/out")


@pytest.mark.story
def test_a_fork_goes_on_and_ends_by_its_own_evaluations(forked: RunSummary) -> None:
    assert "in 5 steps, of 6, ended early after checkpoint 2" in forked.outcome
    run = folder_of("forked")
    assert is_complete(run, RECIPE)
    assert [*find_damage(run)] == []


def test_a_fork_is_refused_a_measure_that_there_is_not_at_its_first_evaluation(
    early: RunFolder,
) -> None:
    recipe = stopping({"when": "held_out/x > 1"}, rollouts={"lag": 1})
    run = fork(early, "misspelt", 2, recipe)
    scores = score_outcomes([ScoredRollout("0", 1.0)]).model_dump(mode="json")
    write_json(run.evaluation("00004"), {"sampled": scores})
    with pytest.raises(UserError, match="held_out/x is not measured"):
        EarlyEnd(recipe, run).look(4)


def centred(**changes: object) -> Recipe:
    return stopping(
        {"when": ALWAYS}, rollouts={"lag": 1}, algorithm={"advantage": "centred"}, **changes
    )


@pytest.mark.story
@pytest.mark.parametrize(("parent", "steps"), [("early", 3), ("forked", 5)])
def test_a_replay_ends_where_its_parent_has_ended(
    forked: RunSummary, parent: str, steps: int
) -> None:
    name = f"replay-of-{parent}"
    summary = replay(centred(), parent, run=name)
    said = f"in {steps} steps, of 6, ended early where {parent} did, after checkpoint"
    assert said in summary.outcome
    assert replay(centred(), parent, run=name).outcome == summary.outcome
    run = folder_of(name)
    assert is_complete(run, centred())
    assert [*find_damage(run)] == []
    assert len(read_metrics(run.metrics)) == steps


@pytest.mark.story
def test_a_replay_whose_end_is_damaged_has_it_again_after_a_resume(early: RunFolder) -> None:
    replay(centred(), "early", run="damaged")
    run = folder_of("damaged")
    end = run.end.read_bytes()
    run.end.write_bytes(end.replace(b"3", b"4", 1))
    (said,) = find_damage(run)
    assert "end.json" in said
    assert said.endswith("Delete it, and resume the run: it is made anew")
    run.end.unlink()
    replay(centred(), "early", run="damaged")
    assert run.end.read_bytes() == end
    assert len(read_metrics(run.metrics)) == 3


@pytest.mark.story
def test_a_replay_of_fewer_steps_has_all_of_them(early: RunFolder) -> None:
    summary = replay(centred(steps=2), "early", run="shorter")
    assert "in 2 steps" in summary.outcome
    assert "early" not in summary.outcome


@pytest.mark.parametrize("stop", [{"when": "held_out/reward/mean > 5"}, {"patience": 3}])
def test_a_replay_refuses_an_end_of_its_own(early: RunFolder, stop: dict[str, object]) -> None:
    recipe = stopping(stop, rollouts={"lag": 1})
    with pytest.raises(RunError, match="a replay ends where its parent has ended; leave stop"):
        replay_run(early, "other", recipe.model_dump(mode="json"), recipe.fingerprint())


@pytest.mark.story
def test_a_sweep_measures_runs_that_end_early_and_repeats_none(root: Path) -> None:
    base = stopping({"when": ALWAYS}).model_dump(mode="json")
    rates = {"optimizer.learning_rate": [0.002, 0.01]}
    recipe = SweepRecipe.model_validate({"base": base, "grid": rates})
    swept = sweep(recipe, run="swept")
    runs = child_runs(folder_of("swept"))
    scored = [read_evaluation(run.evaluation("00001"))["sampled"].finished.mean for run in runs]
    assert [(one.step, one.measured) for one in swept.results] == [(1, mean) for mean in scored]
    names, rows = read_plan(folder_of("swept")).table()
    assert [row[names.index("chosen")] for row in rows].count("best") == 1
    assert sweep(recipe, run="swept").results == swept.results
    owners = [last_owner(run.owners) for run in runs]
    assert [owner.epoch for owner in owners if owner] == [1, 1], "no run was opened again"
