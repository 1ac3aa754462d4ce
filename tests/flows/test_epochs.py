"""A recipe may count epochs: a run is bound to as many steps as they are, once it has its data."""

from pathlib import Path

import pytest

from ratchet.flows.evaluate import evaluate
from ratchet.flows.recipe.loading import RecipeError, changed_recipe, count_steps, read_recipe
from ratchet.flows.recipe.recipe import Recipe
from ratchet.flows.train import train
from ratchet.tasks.recording.step_log import read_metrics
from ratchet.tasks.storage.run_folder import RunError, folder_of
from tests.support.runs.small_recipe import small_recipe


def write_examples(folder: Path, count: int) -> dict[str, object]:
    """Write so many training examples; return the recipe's data set."""
    rows = [f"a quiet otter {number},train" for number in range(count)]
    path = folder / "examples.csv"
    path.write_text("\n".join(["identity,split", *rows, "a loud otter,test"]))
    return {"path": str(path), "columns": ["identity"]}


def in_epochs(folder: Path, epochs: float, examples: int = 6, **changes: object) -> Recipe:
    dataset = write_examples(folder, examples)
    return small_recipe(dataset=dataset, steps=0, epochs=epochs, **changes)


@pytest.mark.parametrize(
    ("epochs", "examples", "groups", "steps"),
    [(1, 8, 4, 2), (1, 9, 4, 3), (1, 3, 4, 1), (2, 9, 4, 5), (0.5, 8, 4, 1), (0.1, 30, 1, 3)],
)
def test_epochs_are_as_many_steps_as_their_examples_fill(
    tmp_path: Path, epochs: float, examples: int, groups: int, steps: int
) -> None:
    rollouts = {"groups": groups, "group_size": 4}
    counted = count_steps(in_epochs(tmp_path, epochs, examples, rollouts=rollouts))
    assert (counted.steps, counted.epochs) == (steps, 0)
    assert (
        counted.fingerprint()
        == small_recipe(
            dataset=write_examples(tmp_path, examples), steps=steps, rollouts=rollouts
        ).fingerprint()
    )


def test_a_value_over_a_recipe_takes_the_place_of_the_other() -> None:
    values = small_recipe().model_dump()
    assert changed_recipe(values, ["epochs=2"]).steps == 0
    assert changed_recipe(changed_recipe(values, ["epochs=2"]).model_dump(), ["steps=3"]).steps == 3


def test_what_does_not_fit_the_steps_is_refused_when_they_are_counted(tmp_path: Path) -> None:
    recipe = in_epochs(tmp_path, 1, optimizer={"learning_rate": 0.005, "warmup_steps": 2})
    with pytest.raises(RecipeError, match=r"optimizer.warmup_steps 2 never end in 2 steps"):
        count_steps(recipe)


@pytest.mark.usefixtures("prefect_server", "no_tinker")
def test_a_run_is_bound_to_steps_and_goes_on_by_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path / "runs"))
    recipe = in_epochs(tmp_path, 1)
    assert train(recipe, run="one").steps == 2
    run = folder_of("one")
    assert read_recipe(run).steps == 2
    assert train(recipe, run="one").steps == len(read_metrics(run.metrics)) == 2
    assert train(small_recipe(dataset=recipe.dataset), run="one").steps == 2
    assert evaluate(recipe, model="base").scores["sampled"].rollouts == 1

    with pytest.raises(RunError, match="steps: 2 → 3"):
        train(in_epochs(tmp_path, 1, 12), run="one")
