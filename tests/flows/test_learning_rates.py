"""The learning rate of a recipe without one: by hand, in the manifest, and where it is refused."""

from pathlib import Path
from typing import Any

import pytest
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import validate
from pydantic import ValidationError

from ratchet.flows.recipe.loading import changed_recipe
from ratchet.flows.recipe.recipe import Recipe
from ratchet.flows.train import train
from ratchet.tasks.settings.run import default_learning_rate
from ratchet.tasks.storage.manifest import bind_run, recipe_of
from tests.support.runs.small_recipe import HELLO

LLAMA, QWEN = "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-30B-A3B"


@pytest.mark.parametrize(
    ("base", "rate"),
    [
        # 0.0005 × 0.48828^0.781 = 0.0005 × exp(0.781 × -0.71687) = 0.0005 × 0.57128
        (LLAMA, 0.000286),
        # 0.0005 × 0.97656^0.0775 = 0.0005 × exp(0.0775 × -0.023717) = 0.0005 × 0.99816
        (QWEN, 0.000499),
        # 0.0005 × 0.390625^0.0775 = 0.0005 × exp(0.0775 × -0.94001) = 0.0005 × 0.92974
        ("Qwen/Qwen3-32B", 0.000465),
    ],
)
def test_the_rule_of_thumb_by_hand(base: str, rate: float) -> None:
    assert default_learning_rate(base) == rate


def values(base: str, **changes: Any) -> dict[str, Any]:
    made = {"agent": "hello", "dataset": {"path": str(HELLO)}, "steps": 2, "model": {"base": base}}
    return made | changes


def test_a_recipe_without_a_learning_rate_holds_the_number() -> None:
    given = Recipe.model_validate(values(LLAMA, optimizer={"learning_rate": 0.000286}))
    for optimizer in ({}, {"optimizer": {}}, {"optimizer": {"learning_rate": None}}):
        recipe = Recipe.model_validate(values(LLAMA, **optimizer))
        assert recipe == given
        assert recipe.fingerprint() == given.fingerprint()
        assert recipe.update_method().optimizer.learning_rate == 0.000286


@pytest.mark.parametrize("base", ["local/tiny-chat", "openai/gpt-oss-20b", "Qwen/Qwen3.5-4B"])
def test_a_model_that_the_rule_was_not_calibrated_on_needs_a_learning_rate(base: str) -> None:
    with pytest.raises(ValidationError, match=f"no default .* {base}.*give optimizer.learning_rat"):
        Recipe.model_validate(values(base))


def test_the_manifest_has_the_number_and_gives_the_same_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path))
    recipe = changed_recipe(values(LLAMA), [f"model.base={QWEN}", "optimizer.beta1=0.8"])
    with bind_run("rated", recipe.model_dump(mode="json"), recipe.fingerprint()) as run:
        assert recipe_of(run)["optimizer"]["learning_rate"] == 0.000499
        assert Recipe.model_validate(recipe_of(run)) == recipe


def test_a_deployment_accepts_a_recipe_without_a_learning_rate() -> None:
    schema = parameter_schema(train).model_dump()
    for optimizer in ({}, {"optimizer": {}}, {"optimizer": {"learning_rate": 0.1}}):
        assert not validate({"recipe": values(LLAMA, **optimizer)}, schema)
    assert validate({"recipe": values(LLAMA, optimizer={"learning_rate": "x"})}, schema)
