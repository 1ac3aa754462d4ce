"""ratchet estimate: what a run will take, beside what it then takes."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from adapters.errors import UserError
from adapters.tinker.prices import Prices
from flows.cli.commands import app
from flows.estimating.dry_training import dry_recipe, passes_of
from flows.estimating.whole import Estimating
from flows.recipe.loading import changed_recipe, named_recipe
from flows.recipe.recipe import Recipe
from flows.recipe.run_recipe import FlowRecipe, RunRecipe
from flows.stages import FLOWS
from flows.train import train
from tasks.reports.costs import describe_estimate
from tasks.spending.estimate import CostEstimate, EstimatedLine, EstimatedRun
from tasks.spending.ledger import read_ledger
from tasks.spending.ranges import ZERO_RANGE, Range, share_of_draws, sum_of_draws
from tasks.storage.run_folder import RunFolder, runs_root
from tests.support.runs.small_recipe import small_recipe

ROOT = Path(__file__).parents[3]


def play(recipe: Recipe, run: str) -> object:
    return train(recipe, run=run)


def refuse(recipe: Recipe, run: str) -> object:
    raise AssertionError(f"{run} was played")


def spent_by(recipe: RunRecipe, run: str) -> dict[str, int]:
    """Train a run, and return its tokens, with those of prompts in one sum."""
    FLOWS[recipe.flow](recipe=recipe, run=run)
    tokens = read_ledger(RunFolder(runs_root() / run)).tokens(answered=True)
    return {"prompts": tokens["prefill"] + tokens.pop("cached"), **tokens}


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """Work in the folder of the recipes that ship."""
    monkeypatch.chdir(ROOT)


@pytest.mark.usefixtures("prefect_server", "no_tinker", "examples")
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("hello-finetune", ["steps=2", "loss=dft", "optimizer.substeps=2", "evaluation.every=1"]),
        ("hello-prefer", ["steps=2", "evaluation.examples=8", "optimizer.epochs=2"]),
    ],
)
def test_texts_and_pairs_are_counted_to_the_token_and_not_played(
    name: str, settings: list[str]
) -> None:
    recipe = named_recipe(name, settings, RunRecipe)
    estimate = Estimating(refuse, "dryruns/a", 4).estimate(recipe, name)
    tokens = estimate.tokens()
    spent = spent_by(recipe, name)
    purposes = {row.purpose for row in read_ledger(RunFolder(runs_root() / name)).rows}
    assert {line.purpose for line in estimate.parts[0].lines} == purposes
    assert tokens == {kind: Range.exact(spent[kind]) for kind in tokens}


@pytest.mark.usefixtures("prefect_server", "no_tinker")
def test_a_run_spends_what_was_estimated_and_the_dry_run_leaves_nothing(root: Path) -> None:
    recipe = small_recipe(
        steps=3,
        algorithm={"kl": {"coefficient": 0.1}},
        optimizer={"learning_rate": 0.005, "substeps": 2, "epochs": 2},
        rollouts={"groups": 8, "group_size": 4, "max_tokens": 16, "lag": 1},
    )
    estimate = Estimating(play, "dryruns/a", 4).estimate(recipe, "small")
    assert [*(root / "dryruns").iterdir()] == []
    spent = spent_by(recipe, "small")
    tokens = estimate.tokens()
    assert {kind: tokens[kind].holds(spent[kind]) for kind in tokens} == dict.fromkeys(tokens, True)
    assert {line.purpose for line in estimate.parts[0].lines} == {
        "evaluation",
        "references",
        "rollouts",
        "updates",
    }
    seconds = estimate.seconds()
    assert seconds is not None
    assert 0 < seconds.low < seconds.expected < seconds.high


@pytest.mark.usefixtures("prefect_server", "no_tinker", "examples")
def test_the_command_writes_a_table_or_everything_as_json() -> None:
    given = ["--set", "steps=1", "--set", "rollouts.groups=2", "--set", "rollouts.group_size=2"]
    given += ["--set", "evaluation.examples=2", "--examples", "2"]
    done = CliRunner().invoke(app, ["estimate", "hello", *given])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[:6]] == [
        *("hello", "purpose", "evaluation", "rollouts", "updates", "all")
    ]
    assert lines[-2].startswith("price   not known")
    assert lines[-1].startswith("time    ")
    said = json.loads(CliRunner().invoke(app, ["estimate", "hello-finetune", "--json"]).stdout)
    assert said["confidence"] == 0.9
    assert said["tokens"]["trained"]["low"] == said["tokens"]["trained"]["high"] > 0
    assert said["runs"][0]["lines"][0]["purpose"] == "updates"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"agent": "tests.support.agents.nobody:play"}, "nobody"),
        ({"algorithm": {"teacher": {"models": ["gone@3"]}}}, "gone"),
    ],
)
@pytest.mark.usefixtures("prefect_server", "no_tinker", "root")
def test_a_recipe_that_cannot_be_played_is_refused_by_what_it_lacks(
    changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(UserError, match=why):
        Estimating(play, "dryruns/a", 2).estimate(small_recipe(**changes), "small")


def test_a_run_that_may_end_early_or_has_a_budget_is_played_without_either() -> None:
    evaluation = {"examples": 4, "every": 1}
    changes = {"stop": {"patience": 1}, "budget": {"tokens": 1}, "evaluation": evaluation}
    dry = dry_recipe(small_recipe(**changes), 2)
    assert (dry.steps, dry.stop.is_given, dry.budget.limits()) == (1, False, {})


@pytest.mark.usefixtures("prefect_server", "no_tinker", "examples")
def test_stages_are_the_sum_of_their_runs_and_of_the_agent_that_evaluates_them() -> None:
    recipe = named_recipe("hello-stages", (), FlowRecipe)
    estimate = Estimating(play, "dryruns/a", 2).estimate(recipe, "s")
    assert [part.run for part in estimate.parts] == [
        *("s-1-texts", "s-2-rewards", "s-3-pairs", "s, its agent")
    ]
    assert {line.purpose for line in estimate.parts[-1].lines} == {"evaluation"}
    trained = [part.tokens()["trained"].expected for part in estimate.parts]
    assert estimate.tokens()["trained"].expected == pytest.approx(sum(trained))


@pytest.mark.usefixtures("prefect_server", "no_tinker", "root")
def test_runs_of_a_sweep_that_play_alike_are_played_once() -> None:
    base = small_recipe(evaluation={"examples": 2, "greedy": False}).model_dump(mode="json")
    grid = {"optimizer.learning_rate": [0.001, 0.005], "steps": [2, 4]}
    values = {"flow": "sweep", "base": base, "grid": grid}
    played: list[str] = []

    def count(recipe: Recipe, run: str) -> object:
        played.append(run)
        return train(recipe, run=run)

    estimate = Estimating(count, "dryruns/a", 2).estimate(
        changed_recipe(values, (), FlowRecipe), "s"
    )
    assert len(estimate.parts) == 4
    assert len(played) == 1
    sampled = [part.tokens()["sampled"].expected for part in estimate.parts]
    assert sampled[0] == sampled[2] < sampled[1] == sampled[3]


def test_a_dry_recipe_has_one_step_whatever_the_recipe_needs_several_for() -> None:
    recipe = small_recipe(
        steps=9,
        optimizer={"learning_rate": 0.01, "schedule": "cosine", "warmup_steps": 3},
        rollouts={"groups": 6, "group_size": 2, "lag": 2, "batches": 3},
    )
    dry = dry_recipe(recipe, 3)
    assert (dry.steps, dry.rollouts.groups, dry.rollouts.lag) == (1, 3, 0)
    assert dry.rollouts.group_size == 2


@pytest.mark.parametrize(
    ("algorithm", "passes"),
    [
        ({}, [1]),
        ({"loss": "sapo"}, [2]),
        ({"kl": {"coefficient": 0.1, "estimator": "k2"}}, [2]),
        ({"loss": "sapo", "kl": {"coefficient": 0.1, "estimator": "k2"}}, [3]),
        ({"expert": {"path": str(ROOT / "datasets" / "hello_texts.jsonl")}}, [1, 1]),
    ],
)
def test_each_term_of_a_loss_reads_the_tokens_once_and_one_by_weights_once_more(
    algorithm: dict[str, Any], passes: list[int]
) -> None:
    recipe = small_recipe(algorithm=algorithm)
    assert passes_of(recipe) == passes
    twice = recipe.optimizer.model_copy(update={"epochs": 2})
    assert passes_of(recipe.model_copy(update={"optimizer": twice})) == [2 * n for n in passes]


def test_a_range_is_wider_the_fewer_draws_were_seen() -> None:
    few, many = sum_of_draws([1.0, 3.0], 100), sum_of_draws([1.0, 3.0] * 20, 100)
    assert few.expected == many.expected == 200
    assert few.low < many.low < 200 < many.high < few.high
    assert sum_of_draws([2.0, 2.0, 2.0], 10) == Range.exact(20)
    assert sum_of_draws([], 10) == ZERO_RANGE
    none, all_ = share_of_draws([0.0] * 4), share_of_draws([1.0] * 4)
    assert none.low == 0.0 < none.expected < none.high < 0.6
    assert 0.4 < all_.low < all_.expected < all_.high == 1.0


def test_a_price_goes_from_all_prompts_in_a_cache_to_none() -> None:
    tokens = {"prompts": Range.exact(1_000_000), "sampled": ZERO_RANGE, "trained": ZERO_RANGE}
    prices = Prices({"prefill": 2.0, "cached": 0.5}, "2026-01-01")
    part = EstimatedRun(
        "one", [EstimatedLine("rollouts", "policy", tokens, cached=0.5)], prices, None, played=8
    )
    assert part.cost() == Range(0.5, 1.25, 2.0)
    said = describe_estimate(CostEstimate("one", [part, part]))
    assert "all 2 runs" in said
    assert "price   2.5 (1 to 4) USD by the prices of 2026-01-01" in said
    unpriced = EstimatedRun(
        "two",
        [EstimatedLine("updates", "policy", {**tokens, "trained": Range.exact(1)})],
        prices,
        None,
    )
    assert CostEstimate("two", [unpriced]).cost() is None
