"""Presets: algorithms by the field's names, which become explicit values of a recipe."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.learning.algorithms import describe_presets
from ratchet.flows.recipe.loading import changed_recipe, named_recipe
from ratchet.flows.recipe.recipe import Recipe
from ratchet.tasks.settings.algorithm import Algorithm
from ratchet.tasks.settings.presets import PRESETS, describe_preset
from ratchet.tasks.settings.section import TABLES
from ratchet.tasks.storage.dotted_keys import flatten, merge_values
from tests.support.runs.small_recipe import small_recipe, taught

TRINITY = [
    *("sft", "cpt", "ppo", "grpo", "dapo", "reinforceplusplus", "rloo", "opmd", "asymre", "dpo"),
    *("topr", "cispo", "gspo", "sapo", "mix", "mix_chord", "raft", "sppo", "rec"),
    *("multi_step_grpo", "gigpo", "on_policy_distill", "jsd", "grpo_verl"),
]
every_preset = pytest.mark.parametrize("name", PRESETS)


def values_of(recipe: Recipe) -> dict[str, Any]:
    return flatten(recipe.model_dump(), TABLES)


def test_trinity_s_names_are_presets_unless_no_flow_of_rollouts_has_the_algorithm() -> None:
    assert len(TRINITY) == 24
    assert {*TRINITY} - PRESETS.keys() == {"sft", "cpt", "dpo", "ppo", "raft"}
    assert PRESETS.keys() - {*TRINITY} == {"dr_grpo"}


@every_preset
def test_a_preset_becomes_explicit_values(name: str) -> None:
    recipe = small_recipe(algorithm=taught(preset=name))
    assert flatten(PRESETS[name].values, TABLES).items() <= values_of(recipe).items()
    assert recipe.update_method().terms(0)[0].service_loss().name


@every_preset
def test_a_recipe_with_a_preset_is_the_recipe_of_its_values(name: str) -> None:
    recipe = small_recipe(algorithm=taught(preset=name))
    again = Recipe.model_validate(recipe.model_dump(mode="json"))
    assert (again, again.fingerprint()) == (recipe, recipe.fingerprint())
    taught_by = {
        "teacher": recipe.algorithm.teacher.model_dump(),
        "expert": recipe.algorithm.expert.model_dump(include={"path"}),
    }
    plain = small_recipe(algorithm=taught_by)
    values = plain.model_dump(exclude_unset=True)
    spelt_out = Recipe.model_validate(merge_values(values, PRESETS[name].values))
    assert spelt_out.fingerprint() == recipe.fingerprint()


def test_what_the_recipe_gives_wins_over_its_preset() -> None:
    given = {"aggregation": "sum", "loss_settings": {"clip_high_threshold": 1.5}}
    algorithm = small_recipe(algorithm={"preset": "grpo", **given}).algorithm
    assert (algorithm.aggregation, algorithm.advantage) == ("sum", "standardized")
    assert algorithm.loss_settings == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.5}


def test_the_settings_of_another_loss_are_not_the_preset_s() -> None:
    algorithm = small_recipe(algorithm={"preset": "grpo", "loss": "cispo"}).algorithm
    assert algorithm.loss_settings == {}
    assert algorithm.advantage_settings == {"threshold": 0.0}


@pytest.mark.parametrize("off", [0, 0.0, "0", "0.00"])
def test_a_preset_s_penalty_can_be_switched_off(off: object) -> None:
    recipe = small_recipe(algorithm={"preset": "rloo", "kl": {"coefficient": off}})
    assert recipe.algorithm.kl.coefficient == 0
    more = small_recipe(algorithm={"preset": "rloo", "kl": {"coefficient": 0.1}}).algorithm.kl
    assert (more.coefficient, more.placement) == (0.1, "reward")


def test_a_preset_of_an_algorithm_that_python_made_is_expanded() -> None:
    algorithm = Algorithm(preset="dapo", aggregation="sum")
    expanded = small_recipe(algorithm=algorithm).algorithm
    assert (expanded.loss, expanded.aggregation) == ("ppo", "sum")


def test_a_preset_on_the_command_line_replaces_the_algorithm_below_it() -> None:
    parent = small_recipe(algorithm={"preset": "rec", "loss_settings": {"clip": "two_side"}})
    replayed = changed_recipe(parent.model_dump(mode="json"), ["algorithm.preset=cispo"])
    assert replayed == small_recipe(algorithm={"preset": "cispo"})
    overrides = ["algorithm.preset=dapo", "algorithm.loss=cispo"]
    assert named_recipe("hello", overrides).algorithm.loss_settings == {}


def test_a_preset_is_described_in_a_line_with_what_is_given_instead_and_what_it_lacks() -> None:
    recipe = small_recipe(algorithm={"preset": "dapo", "aggregation": "sum"})
    said = describe_preset(recipe.model_dump())
    assert said.startswith("preset dapo (arXiv:2503.14476): algorithm.advantage standardized, ")
    assert "algorithm.aggregation sum, rollouts.rounds 10 (given, not the preset's: " in said
    assert "(given, not the preset's: algorithm.aggregation); without its penalty for long" in said
    assert describe_preset(small_recipe().model_dump()) == ""


def test_the_table_of_the_docs_is_that_of_the_code() -> None:
    said = Path("docs/algorithms.md").read_text(encoding="utf-8")
    assert describe_presets().partition("\n\n")[2] in said
