"""A run that ends early, by what is measured on held-out examples, and goes on as it would have."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks.interruptions.compare_runs import list_faults, read_contents
from ratchet.adapters.calls import POLICY
from ratchet.adapters.errors import UserError
from ratchet.flows.finetune import finetune
from ratchet.flows.opening.checks import is_complete
from ratchet.flows.prefer import prefer
from ratchet.flows.recipe.given_recipes import FinetuneRecipe, PreferRecipe
from ratchet.flows.recipe.plan import StagesRecipe
from ratchet.flows.recipe.recipe import Recipe
from ratchet.flows.train import train
from ratchet.tasks.checkpoints import Ledger
from ratchet.tasks.recording.scores import is_scored
from ratchet.tasks.recording.step_log import read_metrics
from ratchet.tasks.reports.verification import find_damage
from ratchet.tasks.settings.run import Stop
from ratchet.tasks.storage.run_folder import RunFolder, folder_of
from tests.support.runs.finetuned import RECIPE
from tests.support.runs.preferred import RECIPE as PAIRS
from tests.support.runs.recorded import RecordedRun
from tests.support.runs.small_recipe import ALWAYS, small_recipe, stopping
from tests.support.runs.staged import VALUES


def files_of(run: RunFolder) -> list[str]:
    """List what a run has of its steps and evaluations."""
    rooms = ("shards", "spans", "datums", "updates", "evaluations")
    found = (path for room in rooms for path in (run.path / room).rglob("*") if path.is_file())
    return sorted(str(path.relative_to(run.path)) for path in found)


@pytest.mark.parametrize("when", ["reward >= 1", "held_out/reward ~ 1", "held_out/x > __import__"])
def test_what_is_no_condition_is_refused(when: str) -> None:
    with pytest.raises(ValueError, match="is no condition; give METRIC"):
        Stop(when=when)


@pytest.mark.parametrize(
    ("when", "said"),
    [
        ("held_out/loss < 0.2", "held_out/loss 0.1 < 0.2"),
        ("held_out/loss <= .1", "held_out/loss 0.1 <= .1"),
        ("held_out/loss>=0.2", ""),
        ("held_out/loss > 1e-1", ""),
    ],
)
def test_a_condition_compares_what_was_measured(when: str, said: str) -> None:
    assert Stop(when=when).met({"held_out/loss": 0.1}, first=True) == said


def test_a_measure_that_there_is_not_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(UserError, match=r"is not measured, but .* did you mean .*reward/mean"):
        Stop(when="held_out/reward/men > 1").met({"held_out/reward/mean": 1.0}, first=True)


@pytest.mark.usefixtures("root", "prefect_server", "no_tinker")
def test_a_run_ends_early_and_is_complete() -> None:
    recipe = stopping({"when": ALWAYS})
    summary = train(recipe, run="early")
    run = folder_of("early")
    assert len(read_metrics(run.metrics)) == 1
    assert is_scored(run.evaluation("00001"))
    assert "in 1 step, of 6, ended early after checkpoint 0: held_out/rew" in summary.outcome
    assert is_complete(run, recipe)
    before = files_of(run)
    assert train(recipe, run="early").outcome == summary.outcome
    assert files_of(run) == before


class Killed(BaseException):
    """End of a process."""


@contextmanager
def dying_at_decision(window: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have a run die `before` or `after` it records that it ends early."""
    record = RunFolder.record_end

    def die(run: RunFolder, step: int, why: str) -> None:
        if window == "after":
            record(run, step, why)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "record_end", die)
        with pytest.raises(Killed):
            yield


@pytest.mark.usefixtures("root", "prefect_server", "no_tinker")
@pytest.mark.story
@pytest.mark.parametrize("window", ["before", "after"])
def test_a_run_with_a_lag_that_dies_at_its_decision_ends_at_the_same_step(
    window: str, recorded_run: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = stopping({"when": ALWAYS}, rollouts={"lag": 1})
    whole, broken = recorded_run(recipe, f"whole-{window}"), folder_of(f"broken-{window}")
    assert len(read_metrics(whole.metrics)) == 3, "checkpoint 0 decides, with two steps begun"
    with dying_at_decision(window, monkeypatch):
        train(recipe, run=broken.name)
    train(recipe, run=broken.name)
    assert list_faults(broken, read_contents(whole)) == []
    assert files_of(broken) == files_of(whole)


@pytest.mark.usefixtures("root", "prefect_server", "no_tinker")
@pytest.mark.story
@pytest.mark.parametrize("window", ["before", "after"])
def test_pairs_end_early_at_an_accuracy_and_keep_the_last_state(
    window: str, recorded_run: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = {"when": "held_out/accuracy >= 0", "patience": 2}
    changes = {"evaluation": {"every": 2, "examples": 16}, "stop": stop}
    recipe = PreferRecipe.model_validate({**PAIRS.model_dump(), **changes})
    whole, broken = recorded_run(recipe, f"whole-pairs-{window}"), folder_of(f"pairs-{window}")
    with dying_at_decision(window, monkeypatch):
        prefer(recipe, run=broken.name)
    summary = prefer(recipe, run=broken.name)
    assert "in 1 step, of 6, ended early after checkpoint 0: held_out/accuracy" in summary.outcome
    assert list_faults(broken, read_contents(whole)) == []
    assert [*find_damage(broken)] == []
    assert Ledger(broken.checkpoints(POLICY)).at(1).state is not None
    assert is_complete(broken, recipe)


@pytest.mark.story
@pytest.mark.usefixtures("root", "prefect_server", "no_tinker")
def test_texts_end_after_evaluations_without_a_lower_loss() -> None:
    changes = {"evaluation": {"every": 1, "examples": 16}, "stop": {"patience": 2}}
    slow = {"optimizer": {"learning_rate": 1.0}}  # too high a rate, by which the loss rises
    recipe = FinetuneRecipe.model_validate({**RECIPE.model_dump(), **changes, **slow})
    summary = finetune(recipe, run="worse")
    steps = len(read_metrics(folder_of("worse").metrics))
    assert steps < recipe.steps
    assert "ended early after checkpoint" in summary.outcome
    assert "2 evaluations without a gain over checkpoint" in summary.outcome
    last = Ledger(folder_of("worse").checkpoints(POLICY)).at(steps)
    assert last.state is not None, "the last checkpoint can be trained further"
    assert is_complete(folder_of("worse"), recipe)


def test_a_stop_without_evaluations_on_the_way_is_refused() -> None:
    with pytest.raises(ValueError, match=r"stop\.patience does nothing where only the first and"):
        Recipe.model_validate({**small_recipe().model_dump(), "stop": {"patience": 1}})


@pytest.mark.story
def test_the_next_stage_starts_where_an_earlier_one_ended() -> None:
    texts, *others = VALUES["stages"]
    stopped = {**texts, "recipe": {**texts["recipe"], "stop": {"patience": 1}}}
    later = [{**one, "start": "last"} if one["name"] == "rewards" else one for one in others]
    recipe = StagesRecipe.model_validate({**VALUES, "stages": [stopped, *later]})
    _, rewards, _ = recipe.children("run")
    assert rewards.start == "run-1-texts", "its last checkpoint, whichever that is"
