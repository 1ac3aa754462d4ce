"""Sweeps: the same run with other values, none repeated, a failed one among them, and a choice."""

from pathlib import Path
from typing import Any

import pytest

from ratchet.adapters.errors import UserError
from ratchet.flows.recipe.loading import changed_recipe, swept_recipe
from ratchet.flows.recipe.plan import SweepRecipe, as_overrides, name_parts
from ratchet.flows.recipe.run_recipe import RunRecipe
from ratchet.flows.stages import PlanSummary
from ratchet.flows.sweep import check_sweep, choose, sweep
from ratchet.tasks.recording.scores import read_evaluation
from ratchet.tasks.reports.page import write_report
from ratchet.tasks.storage.files import write_text
from ratchet.tasks.storage.manifest import parent_of
from ratchet.tasks.storage.owners import last_owner
from ratchet.tasks.storage.plan_record import ChildResult, child_runs, read_plan
from ratchet.tasks.storage.run_folder import RunError, folder_of
from tests.support.runs.killed import train_until_killed
from tests.support.runs.small_recipe import small_recipe
from tests.support.runs.swept import RECIPE

ROOT = Path(__file__).parents[3]
FIRST, SECOND = "some-lr0.002", "some-lr0.01"
FAILED = "some-agenttests.support.agents.unrewarded-play"
BASE = small_recipe().model_dump(mode="json")
TEXTS = {
    "flow": "finetune",
    "steps": 2,
    "optimizer": {"learning_rate": 0.01},
    "dataset": {"runs": ["a"], "query": "select 1", "held_out": "select 2"},
}
FIXED = {"roles": {"rival": "policy"}, "evaluation": {"roles": {"rival": "checkpoint:base"}}}
PAIRS = {
    "flow": "prefer",
    "steps": 2,
    "dataset": {"path": str(ROOT / "datasets" / "hello_pairs.jsonl")},
}
CHOSEN = PAIRS | {"dataset": TEXTS["dataset"]}
UNREFERRED = PAIRS | {"preference": {"loss": "simpo"}}
BESIDE_START = {"evaluation": {"judge": {"agent": "judge:pairs"}}, "roles": {"judge": "a/b"}}
JUDGED = {"judge": {"agent": "judge:pairs"}, "roles": {"judge": "a/b"}}


@pytest.fixture(scope="module")
def swept(root: Path, run_shown: None, no_tinker: None) -> PlanSummary:
    """A sweep that was killed in its second run, and has gone on."""
    train_until_killed("swept", "some")
    assert [run.name for run in child_runs(folder_of("some"))] == [FIRST, SECOND]
    return sweep(RECIPE, run="some")


@pytest.mark.story
def test_a_sweep_that_was_killed_goes_on_and_repeats_no_finished_run(swept: PlanSummary) -> None:
    owners = {name: last_owner(folder_of(name).owners) for name in (FIRST, SECOND)}
    assert {name: owner.epoch for name, owner in owners.items() if owner} == {FIRST: 1, SECOND: 2}
    assert sweep(RECIPE, run="some").results == swept.results
    assert {name: last_owner(folder_of(name).owners) for name in owners} == owners


@pytest.mark.story
def test_a_run_that_fails_is_a_result_with_its_error_and_the_others_are_measured(
    swept: PlanSummary,
) -> None:
    assert [one.run for one in swept.results] == [FIRST, SECOND, FAILED]
    first, second, failed = swept.results
    assert failed.measured is None
    assert failed.error.startswith("StepStopped: ")
    for one in (first, second):
        scored = read_evaluation(folder_of(one.run).evaluation("00002"))["sampled"].finished
        assert (one.measured, one.interval, one.error) == (scored.mean, scored.interval, "")
    assert "of 3 runs, 1 of which failed: some-lr" in swept.outcome


@pytest.mark.story
def test_one_report_has_the_table_and_the_curves_of_every_run(swept: PlanSummary) -> None:
    folder = folder_of("some")
    page = write_report([folder], folder.report).read_text()
    assert "What the runs of the sweep have come to" in page
    assert all(name in page for name in (FIRST, SECOND, "StepStopped"))
    names, rows = read_plan(folder).table()
    assert [row[names.index("chosen")] for row in rows].count("best") == 1


@pytest.mark.story
def test_a_sweep_of_replays_trains_on_rollouts_that_were_sampled_once(swept: PlanSummary) -> None:
    recipe = swept_recipe(None, FIRST, {}, ["optimizer.learning_rate=0.001,0.003"])
    replayed = sweep(recipe, run="replays")
    assert [one.error for one in replayed.results] == ["", ""]
    for run in child_runs(folder_of("replays")):
        parent = parent_of(run)
        assert parent is not None
        assert (parent["run"], parent["how"]) == (FIRST, "replay")


@pytest.mark.story
def test_seeds_with_one_seed_of_evaluations_are_measured_on_the_same_examples(
    swept: PlanSummary,
) -> None:
    fixed = {"evaluation": {"seed": 3, "examples": 4, "greedy": False}, "steps": 1}
    summary = sweep(made(base=BASE | fixed, grid={"seed": [0, 1]}), run="seeds")
    assert [one.error for one in summary.results] == ["", ""]
    runs = child_runs(folder_of("seeds"))
    drawn = [run.shard("test-00001").read_text() for run in runs]
    assert drawn[0] == drawn[1]
    before, again = (run.evaluation("00000").read_bytes() for run in runs)
    assert before == again  # untrained weights, sampled with one seed
    assert [arm.seeds for arm in summary.arms] == [2]


def made(**values: Any) -> SweepRecipe:
    return changed_recipe({"flow": "sweep", "base": BASE, **values}, (), SweepRecipe)


def test_names_say_the_values_and_a_grid_has_every_combination() -> None:
    recipe = made(grid={"optimizer.learning_rate": [0.001, 1e-5], "model.lora_rank": [8, 16]})
    assert ["-".join(["x", *parts.values()]) for parts, _ in recipe.variants()] == [
        *("x-lr0.001-rank8", "x-lr0.001-rank16", "x-lr1e-05-rank8", "x-lr1e-05-rank16")
    ]
    both = {"checkpoints.every": 2, "evaluation.every": 3, "algorithm.loss": "ppo"}
    assert [*name_parts(both).values()] == ["checkpoints.every2", "evaluation.every3", "lossppo"]


def test_keys_that_are_given_several_values_make_a_grid_of_a_recipe(tmp_path: Path) -> None:
    file = str(write_text(tmp_path / "one.yaml", small_recipe().model_dump_json()))
    recipe = swept_recipe(file, None, {}, ["optimizer.learning_rate=0.1,0.2", "steps=5"])
    children = check_sweep(recipe, "x").children
    assert [child.name for child in children] == ["x-lr0.1", "x-lr0.2"]
    assert {child.recipe.steps for child in children} == {5}
    with pytest.raises(UserError, match="no key has several values"):
        swept_recipe(file, None, {}, ["steps=5"])


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "values are given by nothing; give grid, listed or both"),
        (
            {"grid": {"steps": [2]}, "listed": [{"steps": 3}]},
            "in grid and in listed; give it once",
        ),
        ({"grid": {"steps": []}}, "grid: steps has no value"),
        ({"base": None, "grid": {"steps": [2]}}, "give base or replay"),
        ({"grid": {"stepz": [2, 3]}}, "x-stepz2: a recipe has no key 'stepz'; did you mean 'st"),
        ({"grid": {"steps": [2, "two"]}}, "x-stepstwo: recipe.steps: Input should be a valid int"),
        ({"grid": {"algorithm.advantage": ["centred", "centered"]}}, "x-advantagecentered: "),
        ({"listed": [{"steps": 2}, {"steps": 2}]}, "several runs would be called x-steps2; give"),
        ({"grid": {"evaluation.examples": [4, 5]}}, "vary no key of evaluation"),
        ({"grid": {"evaluation.seed": [4, 5]}}, "evaluation.seed: 4 → 5"),
        (
            {"base": PAIRS, "grid": {"preference.loss": ["dpo", "simpo"]}},
            r"preference.loss: 'log p - log ref' → 'log p by token'.*`ratchet compare` has one",
        ),
        ({"grid": {"agent": ["hello", "other"]}}, "agent: 'hello' → 'other'"),
        ({"grid": {"rollouts.max_tokens": [2, 24]}}, r"\(rollouts.max_tokens: 2 → 24\); vary no"),
        ({"grid": {"rollouts.temperature": [1, 0.5]}}, "temperature: 1.0 → 0.5"),
        ({"grid": {"rollouts.max_calls": [1, 2]}}, "rollouts.max_calls: 1 → 2"),
        ({"grid": {"dataset.path": ["a.csv", "b.csv"]}}, "dataset.path: 'a.csv' → 'b.csv'"),
        ({"grid": {"roles.other": ["a/b", "a/c"]}}, "roles.other: 'a/b' → 'a/c'"),
        ({"grid": {"steps": [2]}, "select": "loss"}, "measured by reward, greedy; give one of"),
        ({"grid": {"steps": [2]}, "select": "judged"}, "measured by reward, greedy; give one of"),
        ({"grid": {"steps": [2]}, "replay": "none"}, "x-steps2: there is no run at"),
    ],
)
def test_what_cannot_be_swept_is_refused_before_anything_starts(
    root: Path, no_tinker: None, values: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        check_sweep(made(**values), "x")
    assert [path.name for path in root.glob("x*")] == []


@pytest.mark.parametrize(
    ("base", "select", "values"),
    [
        (BASE, "reward", {"rollouts.groups": 2, "rollouts.lag": 1, "dataset.order": "sequential"}),
        (BASE, "reward", {"model.lora_rank": 4, "seed": 7, "algorithm.advantage": "centred"}),
        (BASE, "greedy", {"rollouts.temperature": 0.5}),
        (BASE | FIXED, "reward", {"roles.rival": "earlier:2"}),
        (BASE | JUDGED, "reward", {"roles.judge": "a/c", "judge.question": "Which is shorter?"}),
        (TEXTS, "loss", {"dataset.query": "select 3", "batch.examples": 3, "loss": "dft"}),
        (TEXTS, "loss", {"model.start": "run@2", "model.lora_rank": 4}),
        (BASE, "reward", {"model.base": "a/b", "model.renderer": "qwen3", "model.start": "run@2"}),
        (BASE | BESIDE_START, "greedy", {"model.start": "run@2"}),
        (PAIRS, "accuracy", {"preference.loss": "kto", "preference.loss_settings": "{beta: 3}"}),
        (PAIRS, "accuracy", {"model.lora_rank": 4, "batch.pairs": 3}),
        (UNREFERRED, "accuracy", {"preference.loss": "orpo", "model.base": "a/b"}),
        (PAIRS | {"preference": {"reference": "run@2"}}, "accuracy", {"model.start": "run@2"}),
    ],
)
def test_runs_are_measured_alike_where_training_alone_differs(
    base: dict[str, Any], select: str, values: dict[str, Any]
) -> None:
    recipe = changed_recipe(base, (), RunRecipe)
    other = changed_recipe(base, as_overrides(values), RunRecipe)
    assert other != recipe
    assert other.measured_by(select) == recipe.measured_by(select)


@pytest.mark.parametrize(
    ("base", "values"),
    [
        (BASE, {"rollouts.timeout_seconds": 5}),
        (BASE | FIXED, {"evaluation.roles": '{"rival": "checkpoint:run@2"}'}),
        (BASE | JUDGED | {"evaluation": {"judge": JUDGED["judge"]}}, {"roles.judge": "a/c"}),
        (TEXTS, {"dataset.held_out": "select 3"}),
        (TEXTS, {"dataset.most_tokens": 9}),
        (TEXTS, {"teacher.model": "base"}),
        (TEXTS, {"model.base": "a/b"}),
        (TEXTS, {"model.renderer": "qwen3"}),
        (BASE | FIXED, {"model.base": "a/b"}),
        (BASE | BESIDE_START, {"model.base": "a/b"}),
        (BASE | BESIDE_START, {"model.start": "run@2"}),
        (PAIRS, {"preference.loss": "cpo"}),
        (PAIRS, {"preference.loss": "ipo"}),
        (PAIRS, {"preference.reference": "base"}),
        (PAIRS, {"model.start": "run@2"}),
        (PAIRS, {"model.base": "a/b"}),
        (UNREFERRED, {"preference.loss": "cpo"}),
        (CHOSEN, {"preference.loss": "kto"}),
    ],
)
def test_runs_are_not_measured_alike_where_held_out_examples_are_measured_otherwise(
    base: dict[str, Any], values: dict[str, Any]
) -> None:
    recipe = changed_recipe(base, (), RunRecipe)
    other = changed_recipe(base, as_overrides(values), RunRecipe)
    assert other.measured_by("reward") != recipe.measured_by("reward")


def test_the_best_has_the_highest_reward_or_the_lowest_loss_and_the_first_of_equal_ones() -> None:
    measured = (0.5, None, 0.7, 0.7, 0.2)
    results = [ChildResult(f"run{n}", 2, measured=value) for n, value in enumerate(measured)]
    chosen = {select: choose(results, select) for select in ("reward", "loss")}
    assert [one.run for one in chosen["reward"] if one.chosen] == ["run2"]
    assert [one.run for one in chosen["loss"] if one.chosen] == ["run4"]
    with pytest.raises(RunError, match=r"each run has failed \(1\), a since it broke; mend"):
        choose([ChildResult("a", 0, error="it broke")], "reward")
