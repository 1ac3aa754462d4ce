"""The last lines of a dry run: the tokens and the price of the whole recipe."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from ratchet.flows.cli.commands import app
from ratchet.flows.cli.recipes import describe_given
from ratchet.flows.recipe.given_examples import GivenRecipe
from ratchet.flows.recipe.loading import named_recipe
from ratchet.flows.recipe.recipe import Recipe
from ratchet.flows.recipe.run_recipe import RunRecipe
from ratchet.flows.recipe.whole_recipe import multiply_played
from ratchet.flows.stages import FLOWS
from ratchet.tasks.recording.spans import OURS
from ratchet.tasks.spending.ledger import read_ledger
from ratchet.tasks.storage.manifest import write_manifest
from ratchet.tasks.storage.run_folder import RunFolder, folder_of
from ratchet.tasks.storage.tables import write_table
from tests.support.runs.small_recipe import small_recipe
from tests.tasks.test_reports import ended, rollout, said, sealed

ROOT = Path(__file__).parents[3]
TAKEN = {"gen_ai_usage_input_tokens": 10, "gen_ai_usage_output_tokens": 4}
CALL = said("?", "yes", gen_ai_provider_name=OURS, attributes={"cached_tokens": 2}, **TAKEN)


@pytest.fixture
def dry(root: Path) -> RunFolder:
    """A dry run of two rollouts of one call, with ten tokens of a prompt and four of an answer."""
    run = folder_of("dryruns/a")
    write_manifest(run, small_recipe().model_dump(mode="json"), "f00d")
    sealed(run.spans("train-00000.0"), *(rollout(k, CALL, ended(1.0)) for k in (0, 1)))
    own = {"tokens": [*range(14)], "mask": [0] * 10 + [1] * 4}
    write_table(pa.Table.from_pylist([own, own]), run.trajectories("policy", 0))
    return run


def whole_of(dry: RunFolder, **changes: Any) -> tuple[int, ...]:
    """Return the tokens of prompts, of those in a cache, of answers, and of training."""
    return tuple(multiply_played(small_recipe(steps=3, **changes), dry, 2).tokens.values())


def test_the_mean_of_a_rollout_is_multiplied_by_the_rollouts_of_the_recipe(dry: RunFolder) -> None:
    rollouts = {"groups": 4, "group_size": 4, "max_tokens": 16}
    training, held_out = 3 * 4 * 4, 2 * 4 * (1 + 1)
    both = training + held_out
    assert whole_of(dry, rollouts=rollouts) == (8 * both, 2 * both, 4 * both, 13 * training)
    twice = {"optimizer": {"learning_rate": 0.01, "epochs": 2}, "evaluation": {"examples": 8}}
    both = training + 2 * held_out
    assert whole_of(dry, rollouts=rollouts, **twice) == (
        *(8 * both, 2 * both, 4 * both),
        2 * 13 * training,
    )


def test_the_lines_have_the_price_of_the_recipe_s_own_model(
    dry: RunFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recipe = small_recipe(steps=3, rollouts={"groups": 4, "group_size": 4, "max_tokens": 16})
    lines = str(multiply_played(recipe, dry, 2)).splitlines()
    assert lines == [
        "# whole recipe",
        "",
        "prefill 512, cached 128, sampled 256, trained 624",
        "for 48 rollouts of training and 16 of evaluations, by the mean of the 2 that were played",
        "no price is known",
    ]
    prices = {"prefill": 10_000, "sample": 100_000, "train": 1_000_000, "cached": 0}
    file = tmp_path / "prices.json"
    file.write_text(json.dumps([{"tinker_id": "local/tiny-chat", **prices}]))
    monkeypatch.setenv("RATCHET_PRICES", str(file))
    dollars = 512 * 0.01 + 256 * 0.1 + 624 * 1
    assert str(multiply_played(recipe, dry, 2)).splitlines()[-1] == f"${dollars:.2f}" == "$654.72"


@pytest.mark.usefixtures("prefect_server", "no_tinker")
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("hello-finetune", ["steps=2", "loss=dft", "optimizer.substeps=2", "evaluation.every=1"]),
        pytest.param(
            *("hello-prefer", ["steps=2", "evaluation.examples=8", "optimizer.epochs=2"]),
            marks=pytest.mark.story,
        ),
    ],
)
def test_texts_and_pairs_are_counted_to_the_token(
    name: str, settings: list[str], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("ratchet.tasks.given.tallies.SHOW_SECONDS", 600.0)  # a busy machine's
    recipe = named_recipe(name, settings, RunRecipe)
    assert isinstance(recipe, GivenRecipe)
    whole: Any = describe_given(recipe, 1)["whole"]
    FLOWS[recipe.flow](recipe=recipe, run=name)
    spent = read_ledger(folder_of(name)).tokens(answered=True)
    spent["prefill"] += spent["cached"]  # what is in a cache is known when it is computed
    assert whole["tokens"] == {**spent, "cached": 0}


@pytest.mark.usefixtures("prefect_server", "no_tinker")
def test_a_dry_run_ends_with_the_whole_recipe(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    given = ["dryrun", "hello", "--examples", "1", "--set", "rollouts.groups=3"]
    done = CliRunner().invoke(app, [*given, "--json"])
    record, recipe = json.loads(done.stdout), named_recipe("hello", ["rollouts.groups=3"], Recipe)
    training = recipe.steps * 3 * recipe.rollouts.group_size
    assert record["whole"]["tokens"]["sampled"] > training
    assert record["whole"]["found"].startswith(f"for {training} rollouts of training and ")
    assert record["report"].endswith(f"{record['whole']['found']}\nno price is known")
