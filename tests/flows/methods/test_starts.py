"""Runs whose weights start at a checkpoint of an earlier run."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.interruptions.compare_runs import differing_parts, list_faults, read_contents
from ratchet.adapters.calls import POLICY
from ratchet.adapters.errors import UserError
from ratchet.engine.state.registry import find_damaged_state
from ratchet.flows.checkpoints.binding import bind_checkpoints, find_start, read_bound
from ratchet.flows.checkpoints.forks import fork_run
from ratchet.flows.checkpoints.names import best_step
from ratchet.flows.finetune import finetune
from ratchet.flows.recipe.given_recipes import FinetuneRecipe
from ratchet.flows.recipe.recipe import Recipe
from ratchet.flows.replay import replay
from ratchet.flows.train import train
from ratchet.tasks.checkpoints import Ledger
from ratchet.tasks.recording.step_log import read_metrics
from ratchet.tasks.reports.board.runs import runs_table
from ratchet.tasks.reports.facts import describe_origin, read_facts
from ratchet.tasks.reports.page import render_report
from ratchet.tasks.storage.files import write_text
from ratchet.tasks.storage.manifest import write_manifest
from ratchet.tasks.storage.run_folder import RunFolder, folder_of
from tests.support.damages import flip
from tests.support.runs.finetuned import RECIPE
from tests.support.runs.recorded import RecordedRun
from tests.support.runs.small_recipe import small_recipe


@pytest.fixture(scope="module")
def first(root: Path, recorded_run: RecordedRun) -> RunFolder:
    return recorded_run(RECIPE, "first")


def started(**model: Any) -> FinetuneRecipe:
    values = RECIPE.model_dump() | {"model": {"lora_rank": 8, **model}, "steps": 3}
    return FinetuneRecipe.model_validate(values)


@pytest.fixture(scope="module")
def second(first: RunFolder) -> RunFolder:
    return folder_of(finetune(started(start="first@4"), run="second").run)


def test_the_weights_are_those_of_the_checkpoint_and_the_optimizer_is_new(
    first: RunFolder, second: RunFolder
) -> None:
    scored = read_facts(second).held_out.by_step
    assert scored[0] == pytest.approx(read_facts(first).held_out.by_step[4], abs=1e-9)
    assert scored[3] < scored[0]
    bound = read_bound(second, "first@4")
    held_out = read_facts(first).held_out.by_step[4]
    assert (bound.run, bound.step, bound.held_out) == ("first", 4, held_out)
    assert bound.model["lora_rank"] == 8


def test_a_run_starts_at_the_best_checkpoint_that_there_is_when_it_begins(first: RunFolder) -> None:
    bound = bind_checkpoints(started(start="first@best"), {})
    assert bound["first@best"]["step"] == best_step(first)


def test_the_run_says_where_it_comes_from(second: RunFolder) -> None:
    assert describe_origin(second) == "started at first@4"
    row = next(line for line in runs_table(120).splitlines() if line.startswith("second"))
    assert "first@4" in row
    assert "bound to first@4" in render_report([second])


@pytest.mark.story
def test_a_run_goes_on_from_its_start_when_the_earlier_run_and_every_state_are_gone(
    first: RunFolder, second: RunFolder, tmp_path: Path
) -> None:
    shutil.copytree(second.path, folder_of("again").path)
    again = folder_of("again")
    write_text(again.metrics, "".join(again.metrics.read_text().splitlines(keepends=True)[:1]))
    _forget_states(again)
    for step in (1, 2):
        again.update(POLICY, step).unlink()
    first.path.rename(tmp_path / "gone")
    try:
        finetune(started(start="first@4"), run="again")
    finally:
        (tmp_path / "gone").rename(first.path)
    assert differing_parts(read_contents(again), read_contents(second)) == []


@pytest.mark.story
def test_a_start_that_is_damaged_is_made_again_by_its_run(
    first: RunFolder, second: RunFolder
) -> None:
    saved = Ledger(first.checkpoints(POLICY)).at(4)
    assert saved.state is not None
    for address, name in ((saved.sampler, "adapter_config.json"), (saved.state, "optimizer.*")):
        [file] = first.engine.glob(f"tensors/{address.removeprefix('tinker://')}.*/{name}")
        flip(file)
    mended = folder_of(finetune(started(start="first@4"), run="mended").run)
    assert differing_parts(read_contents(mended), read_contents(second)) == []
    assert find_damaged_state(first.engine) == []

    bound = read_bound(mended, "first@4").policies[POLICY].state
    assert bound is not None
    [state] = mended.engine.glob(f"tensors/{bound.removeprefix('tinker://')}.*")
    shutil.rmtree(state)
    finetune(started(start="first@4"), run="mended")
    assert find_damaged_state(mended.engine) == []


@pytest.mark.story
def test_a_damaged_start_whose_run_is_gone_is_refused_by_the_file(
    second: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path))
    alone = RunFolder(shutil.copytree(second.path, tmp_path / "alone"))
    saved = read_bound(alone, "first@4").policies[POLICY].sampler
    [weights] = alone.engine.glob(
        f"tensors/{saved.removeprefix('tinker://')}.*/adapter_model.safetensors"
    )
    copy = weights.read_bytes()
    flip(weights)
    with pytest.raises(UserError, match=f"{weights} is not as it was saved"):
        finetune(started(start="first@4"), run="alone")
    weights.write_bytes(copy)
    finetune(started(start="first@4"), run="alone")


@pytest.mark.story
def test_with_its_optimizer_a_start_continues_as_if_the_run_had_gone_on(first: RunFolder) -> None:
    kept = folder_of(finetune(started(start="first@4", start_optimizer=True), run="kept").run)
    assert read_bound(kept, "first@4").policies[POLICY].optimizer_steps == 4
    shutil.copytree(kept.path, folder_of("rebuilt").path)
    rebuilt = folder_of("rebuilt")
    lines = rebuilt.metrics.read_text().splitlines(keepends=True)
    write_text(rebuilt.metrics, "".join(lines[:1]))
    for step in (1, 2):
        rebuilt.update(POLICY, step).unlink()
    finetune(started(start="first@4", start_optimizer=True), run="rebuilt")
    assert list_faults(rebuilt, read_contents(kept)) == []
    losses = [read_metrics(run.metrics)[2]["loss"] for run in (kept, folder_of("second"))]
    assert losses[0] != losses[1], "moments of the earlier optimizer change the steps"


def test_a_checkpoint_may_be_the_start_and_the_reference_of_one_run(first: RunFolder) -> None:
    divergence = {"coefficient": 0.1, "reference": "first:policy@6"}
    both = small_recipe(
        model={"lora_rank": 8, "start": "first:policy@6"}, algorithm={"kl": divergence}
    )
    bound = bind_checkpoints(both, {})
    assert [*bound] == ["first:policy@6"]
    assert bound["first:policy@6"]["policies"][POLICY]["state"] is not None
    other = small_recipe(model={"lora_rank": 8, "start": "first:fox@6"})
    with pytest.raises(UserError, match="trains no policy fox; it trains policy"):
        bind_checkpoints(other, {})


@pytest.mark.story
def test_each_policy_starts_at_the_one_of_its_name_or_else_at_the_main_one(
    first: RunFolder,
) -> None:
    model = {"lora_rank": 8, "start": "first@6"}
    recipe = small_recipe(model=model, roles={"judge": "policy:fox", "teller": "policy:owl"})
    bound = bind_checkpoints(recipe, {})
    saved = bound["first@6"]["policies"][POLICY]
    bound["first@6"]["policies"]["fox"] = {**saved, "state": "tinker://fox/weights/6"}
    write_manifest(folder_of("many"), recipe.model_dump(mode="json"), "f00d", {"bound": bound})
    starts = {name: find_start(recipe, folder_of("many"), name) for name in recipe.policies()}
    assert {name: start and start.state for name, start in starts.items()} == {
        POLICY: saved["state"],
        "fox": "tinker://fox/weights/6",
        "owl": saved["state"],
    }


@pytest.mark.story
def test_reinforcement_learning_starts_where_supervised_learning_ended(first: RunFolder) -> None:
    near = {"coefficient": 0.1, "reference": "first@6"}
    recipe = small_recipe(model={"lora_rank": 8, "start": "first@6"}, algorithm={"kl": near})
    run = folder_of(train(recipe, run="after").run)
    assert Ledger(run.checkpoints(POLICY)).at(0).state is not None
    replayed = Recipe.model_validate(recipe.model_dump() | {"algorithm": {"advantage": "centred"}})
    replay(replayed, "after", run="replayed")
    assert read_bound(folder_of("replayed"), "first@6") == read_bound(run, "first@6")
    fork = recipe.model_copy(update={"steps": 3})
    fork_run(run, "forked", 1, fork.model_dump(mode="json"), fork.fingerprint())
    train(fork, run="forked")
    assert read_bound(folder_of("forked"), "first@6") == read_bound(run, "first@6")


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"start": "nobody@1"}, "names no run"),
        ({"start": "first@9"}, "has no checkpoint 9"),
        ({"start": "first@3"}, "those of first with one are 0, 2, 4, 6"),
        ({"start": "first@4", "lora_rank": 4}, "model.lora_rank 8, and the recipe has 4"),
        ({"start": "first@4", "renderer": "default"}, "model.renderer auto"),
        ({"start": "tinker://a/weights/b"}, "give RUN@STEP"),
        ({"start_optimizer": True}, "does nothing without start"),
    ],
)
def test_a_start_that_cannot_be_one_is_refused(
    first: RunFolder, model: dict[str, Any], said: str
) -> None:
    with pytest.raises((UserError, ValueError), match=said):
        finetune(started(**model), run="refused")
    assert not folder_of("refused").exists()


@pytest.mark.story
def test_an_earlier_run_that_was_made_anew_is_not_taken_for_the_one_that_was_bound(
    second: RunFolder, tmp_path: Path
) -> None:
    copy = folder_of("bereft")
    shutil.copytree(second.path, copy.path)
    shutil.rmtree(copy.engine)
    folder_of("first").path.rename(tmp_path / "first")
    try:
        with pytest.raises(UserError, match=r"model.start first@4 is gone"):
            finetune(started(start="first@4").model_copy(update={"steps": 3}), run="bereft")
    finally:
        (tmp_path / "first").rename(folder_of("first").path)


def _forget_states(run: RunFolder) -> None:
    """Remove every training state that the run itself has saved, as if all had expired."""
    kept = read_bound(run, "first@4").policies[POLICY].state
    assert kept is not None
    training = kept.removeprefix("tinker://").partition("/")[0]
    for folder in run.engine.rglob("weights"):
        if training not in folder.as_posix():
            shutil.rmtree(folder)
