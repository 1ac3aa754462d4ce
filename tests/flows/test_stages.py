"""Runs in stages: each is a run of its own, and starts where an earlier one ended."""

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from benchmarks.interruptions.compare_runs import differing_parts, list_faults, read_contents
from ratchet.adapters.errors import UserError
from ratchet.flows.checkpoints.binding import read_bound
from ratchet.flows.checkpoints.names import best_step
from ratchet.flows.cli.training import delete_runs, find_replaced_from
from ratchet.flows.recipe.loading import changed_recipe
from ratchet.flows.recipe.plan import StagesRecipe
from ratchet.flows.stages import check_stages, stages
from ratchet.tasks.reports.board.runs import runs_table
from ratchet.tasks.reports.page import write_report
from ratchet.tasks.storage.owners import last_owner
from ratchet.tasks.storage.plan_record import child_runs, read_plan
from ratchet.tasks.storage.run_folder import RunFolder, folder_of
from tests.support.runs.killed import train_until_killed
from tests.support.runs.staged import HELLO, RECIPE, SHARED, VALUES

ROOT = Path(__file__).parents[2]
NAMES = ["whole-1-texts", "whole-2-rewards", "whole-3-pairs"]


@pytest.fixture(scope="module")
def whole(root: Path, run_shown: None, no_tinker: None) -> RunFolder:
    """A run of stages that nothing has interrupted."""
    return folder_of(stages(RECIPE, run="whole").run)


def test_each_stage_is_a_run_that_starts_at_a_checkpoint_of_an_earlier_one(
    whole: RunFolder,
) -> None:
    texts, rewards, pairs = child_runs(whole)
    assert [run.name for run in (texts, rewards, pairs)] == NAMES
    assert read_bound(rewards, f"{NAMES[0]}@best").step == best_step(texts)
    assert read_bound(pairs, f"{NAMES[1]}@2").step == 2
    table = runs_table(120)
    assert all(parent in table for parent in (f"{NAMES[0]}@best", f"{NAMES[1]}@2"))


def test_one_agent_plays_the_same_examples_before_and_after_each_stage(whole: RunFolder) -> None:
    results = read_plan(whole).results
    assert [one.stage for one in results] == ["before", "texts", "rewards", "pairs"]
    assert all(one.measured is not None for one in results)
    best = best_step(folder_of(NAMES[0]))
    assert [one.step for one in results] == [0, best, 2, 2]
    shards = [
        path.read_text()
        for name in NAMES
        for path in sorted((folder_of(name).path / "shards").glob("test.*-*.jsonl"))
    ]
    assert len(shards) == 3, "the stage of rewards has played what is asked for by itself"
    assert len({*shards}) == 1


def test_one_report_has_the_table_of_stages_and_each_of_their_runs(whole: RunFolder) -> None:
    page = write_report([whole], whole.report).read_text()
    assert "What the stages have come to" in page
    assert all(name in page for name in NAMES)


def test_a_run_whose_stages_have_finished_opens_none_of_them_again(whole: RunFolder) -> None:
    before = [last_owner(run.owners) for run in child_runs(whole)]
    stages(RECIPE, run="whole")
    assert [last_owner(run.owners) for run in child_runs(whole)] == before


@pytest.mark.story
def test_trained_anew_from_a_stage_the_earlier_ones_stay_as_they_are(whole: RunFolder) -> None:
    shutil.copytree(folder_of(NAMES[0]).path, folder_of("anew-1-texts").path)
    changed = changed_recipe(
        VALUES, ["stages.pairs.recipe.optimizer.learning_rate=0.001"], StagesRecipe
    )
    stages(RECIPE, run="anew")
    owners = last_owner(folder_of("anew-2-rewards").owners)
    with pytest.raises(UserError, match=r"optimizer\.learning_rate: 0\.002 → 0\.001"):
        stages(changed, run="anew")
    with pytest.raises(UserError, match="rewards, pairs; did you mean 'pairs'"):
        find_replaced_from("anew", changed.names(), "pair")
    delete_runs(find_replaced_from("anew", changed.names(), "pairs"))
    stages(changed, run="anew")
    assert last_owner(folder_of("anew-2-rewards").owners) == owners
    contents = [read_contents(folder_of(name)) for name in ("anew-3-pairs", NAMES[2])]
    assert "weights" in differing_parts(*contents)


@pytest.mark.story
@pytest.mark.parametrize(
    ("place", "number"),
    [("1-texts", signal.SIGTERM), ("between", signal.SIGKILL), ("2-rewards", signal.SIGKILL)],
)
def test_a_run_that_was_killed_in_or_between_stages_goes_on_as_if_it_had_not(
    whole: RunFolder, root: Path, number: signal.Signals, place: str
) -> None:
    name = f"killed-{place}-{number}"
    train_until_killed("staged", name, place, str(int(number)), by=number)
    began = [run.name for run in child_runs(folder_of(name))]
    assert began[-1].endswith(place) or (place == "between" and len(began) == 1)
    stages(RECIPE, run=name)
    for run, reference in zip(child_runs(folder_of(name)), NAMES, strict=True):
        assert list_faults(run, read_contents(folder_of(reference))) == []
    table = [(one.measured, one.step) for one in read_plan(folder_of(name)).results]
    assert table == [(one.measured, one.step) for one in read_plan(whole).results]


def with_changes(**stages_by_name: Any) -> StagesRecipe:
    keys = [
        f"stages.{name}.{key}={value}"
        for name, keys in stages_by_name.items()
        for key, value in keys.items()
    ]
    return changed_recipe(VALUES, keys, StagesRecipe)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"texts": {"start": "last"}, "rewards": {"name": "texts"}}, "give each another name"),
        ({"texts": {"start": "best"}}, "start best of the first stage texts"),
        ({"rewards": {"start": "pairs@last"}}, "no stage before it is called pairs; give one of t"),
        ({"rewards": {"recipe.model.start": "other@3"}}, "give start of the stage in its place"),
        ({"rewards": {"recipe.model.lora_rank": 4}}, "model.lora_rank 8, and the recipe has 4"),
        ({"pairs": {"recipe.model.base": "other/base"}}, "model.base local/tiny-chat, and the rec"),
        ({"texts": {"recipe.evaluation.every": 3}}, "starts at step best of stage texts"),
        ({"pairs": {"start": "1"}, "rewards": {"recipe.checkpoints.every": 2}}, "starts at step 1"),
        (
            {"pairs": {"start": "1"}, "rewards": {"recipe.checkpoints": "{every: 1, keep: 1}"}},
            "starts at step 1 of stage rewards, which saves and keeps no",
        ),
        ({"pairs": {"start": "first"}}, "recipe.stages.2.start"),
        ({"pairs": {"flow": "replay"}}, "recipe.stages.2.flow"),
        ({"pairs": {"recipe.pears": "1"}}, r"stage pairs: recipe.pears: Extra inputs"),
        ({"pear": {"start": "1"}}, "no such stage; did you mean 'pairs'"),
        (
            {"rewards": {"recipe.algorithm.kl": "{coefficient: 1, reference: '{pairs}@2'}"}},
            "begins",
        ),
    ],
)
def test_an_order_or_a_start_that_cannot_be_is_refused_before_anything_runs(
    change: dict[str, dict[str, Any]], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        with_changes(**change)


def test_shared_keys_are_those_of_each_recipe_that_knows_them() -> None:
    recipe = changed_recipe(VALUES, ["shared.seed=5", "shared.rollouts.max_calls=9"], StagesRecipe)
    texts, rewards, pairs = (stage.recipe for stage in recipe.stages)
    assert (texts.seed, rewards.seed, pairs.seed) == (5, 5, 5)
    assert recipe.evaluate is not None
    assert recipe.evaluate.rollouts.max_calls == 9
    assert rewards.model_dump()["rollouts"]["max_calls"] == 9
    own = changed_recipe(VALUES, ["shared.seed=5", "stages.texts.recipe.seed=3"], StagesRecipe)
    assert [stage.recipe.seed for stage in own.stages] == [3, 5, 5], "its own key counts first"
    with pytest.raises(UserError, match="shared rewards is a key of no stage"):
        changed_recipe(VALUES, ["shared.rewards=1"], StagesRecipe)


def test_a_text_of_a_recipe_may_name_the_run_of_an_earlier_stage() -> None:
    near = "{coefficient: 0.1, reference: '{texts}@last'}"
    _, rewards, _ = with_changes(rewards={"recipe.algorithm.kl": near}).children("run")
    assert rewards.recipe.model_dump()["algorithm"]["kl"]["reference"] == "run-1-texts@last"


@pytest.mark.story
def test_a_stage_may_learn_the_rollouts_of_an_earlier_one_whose_number_says_its_steps(
    root: Path, prefect_server: None, no_tinker: None
) -> None:
    chosen = "select run, rollout_id from rollouts where split = 'train' and step = {}"
    dataset = {"runs": ["{rewards}"], "query": chosen.format(0), "held_out": chosen.format(1)}
    texts = {"dataset": dataset, "epochs": 1, "batch": {"examples": 8}}
    again = {"name": "again", "flow": "finetune", "recipe": texts}
    first = {"name": "rewards", "recipe": HELLO}
    recipe = StagesRecipe.model_validate({"shared": SHARED, "stages": [first, again]})
    summary = stages(recipe, run="chosen")
    assert [one.start for one in summary.results] == ["", "chosen-1-rewards@2"]
    assert summary.results[1].step == 2, "16 rollouts, 8 a step"
    assert summary.outcome.startswith("rewards: held-out reward ")


def test_a_run_without_stages_is_not_taken_for_one_that_has_them(whole: RunFolder) -> None:
    with pytest.raises(UserError, match="exists, and is no run of stages"):
        check_stages(RECIPE, NAMES[0])
    with pytest.raises(UserError, match="there is no run nobody of stages"):
        find_replaced_from("nobody", RECIPE.names(), "texts")
