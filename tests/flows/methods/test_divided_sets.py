"""Data sets without splits, or with splits of other names, train by a key or by none."""

from pathlib import Path
from typing import Any

import pytest

from ratchet.adapters.errors import UserError
from ratchet.flows.finetune import finetune
from ratchet.flows.opening.flow_runs import NOTHING, summarize_run
from ratchet.flows.prefer import prefer
from ratchet.flows.recipe.given_recipes import FinetuneRecipe, PreferRecipe
from ratchet.flows.recipe.run_recipe import RunRecipe
from ratchet.tasks.examples.reading import DatasetError
from ratchet.tasks.storage.run_folder import folder_of
from tests.support.runs.small_recipe import small_recipe
from tests.tasks.test_examples import jsonl

SMALL: dict[str, Any] = {
    "steps": 1,
    "model": {"lora_rank": 4},
    "optimizer": {"learning_rate": 0.001},
    "checkpoints": {"every": 1},
}
ROWS = [{"text": f"I am owl {number}."} for number in range(40)]


def texts(path: Path, seed: int = 0, **dataset: Any) -> FinetuneRecipe:
    values = {"dataset": {"path": str(path), **dataset}, "seed": seed, **SMALL}
    return FinetuneRecipe.model_validate(values)


def sides(recipe: RunRecipe) -> dict[str, list[int]]:
    """Map the splits to the numbers of their rows."""
    return {
        split: [row["example_id"] for row in source.examples()]
        for split, source in recipe.sources().items()
    }


def test_a_file_without_splits_has_a_tenth_held_out(tmp_path: Path) -> None:
    recipe = texts(jsonl(tmp_path / "a.jsonl", *ROWS))
    divided = sides(recipe)
    assert len(divided["test"]) == 4
    assert sorted([*divided["train"], *divided["test"]]) == list(range(40))
    [said, other] = [source.describe_division() for source in recipe.sources().values()]
    assert said == other
    assert said.startswith("4 of the 40 rows of a.jsonl are held out, by a share of 0.1")


def test_nothing_is_said_of_a_set_that_is_trained_whole(tmp_path: Path) -> None:
    recipe = texts(jsonl(tmp_path / "a.jsonl", *ROWS), held_out=0)
    assert [source.describe_division() for source in recipe.sources().values()] == [""]


def test_what_is_held_out_depends_on_the_rows_and_the_seed_alone(tmp_path: Path) -> None:
    path, turned = (tmp_path / name for name in ("a.jsonl", "b.jsonl"))
    jsonl(path, *ROWS)
    jsonl(turned, *ROWS[::-1])
    first = sides(texts(path))["test"]
    assert sides(texts(path))["test"] == first
    assert [39 - number for number in sides(texts(turned))["test"]][::-1] == first
    assert sides(texts(path, seed=1))["test"] != first
    fixed = texts(path, seed=1).model_copy(
        update={"evaluation": texts(path).evaluation.model_copy(update={"seed": 0})}
    )
    assert sides(fixed)["test"] == first


def test_equal_rows_are_on_one_side(tmp_path: Path) -> None:
    recipe = texts(jsonl(tmp_path / "a.jsonl", *ROWS, *ROWS), held_out=0.25)
    found = {split: {number % 40 for number in rows} for split, rows in sides(recipe).items()}
    assert len(found["test"]) == 10
    assert not found["train"] & found["test"]


@pytest.mark.parametrize("kind", ["texts", "pairs", "prompts"])
def test_every_flow_divides_a_lone_file(tmp_path: Path, kind: str) -> None:
    path = str(jsonl(tmp_path / "a.jsonl", *ROWS))
    recipe = {
        "texts": lambda: texts(Path(path)),
        "pairs": lambda: PreferRecipe.model_validate({"dataset": {"path": path}, **SMALL}),
        "prompts": lambda: small_recipe(dataset={"path": path}),
    }[kind]()
    assert [len(rows) for rows in sides(recipe).values()] == [36, 4]


def test_a_file_with_splits_is_as_it_was(tmp_path: Path) -> None:
    rows = [{"text": "a", "split": "train"}, {"text": "b", "split": "test"}]
    path = jsonl(tmp_path / "a.jsonl", *rows)
    assert sides(texts(path)) == {"train": [0], "test": [1]}
    mixed = jsonl(tmp_path / "b.jsonl", {"text": "a"}, *rows)
    with pytest.raises(DatasetError, match=r"row 0 of .* has no column 'split'"):
        sides(texts(mixed))


def test_splits_of_other_names_are_given_by_a_key(tmp_path: Path) -> None:
    rows = [{"text": f"{n}", "split": f"{name}_sft"} for n, name in enumerate(("test", "train"))]
    path = jsonl(tmp_path / "a.jsonl", *rows)
    with pytest.raises(DatasetError, match=r"found: test_sft, train_sft\); give dataset\.splits"):
        sides(texts(path))
    assert sides(texts(path, splits=["train_sft", "test_sft"])) == {"train": [1], "test": [0]}
    (folder := tmp_path / "data").mkdir()
    jsonl(folder / "train_prefs-00000-of-00001.jsonl", *ROWS)
    jsonl(folder / "test_prefs.jsonl", *ROWS[:2])
    named = texts(folder, splits=["train_prefs", "test_prefs"])
    assert [len(rows) for rows in sides(named).values()] == [40, 2]


def test_a_split_column_of_nulls_is_none(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", *({"split": None, **row} for row in ROWS))
    assert [len(rows) for rows in sides(texts(path)).values()] == [36, 4]


def test_a_set_with_the_first_split_alone_is_divided_by_a_share(tmp_path: Path) -> None:
    jsonl(tmp_path / "train.jsonl", *ROWS)
    with pytest.raises(DatasetError, match=r"split 'test'.*give dataset\.splits or dataset\.held"):
        sides(texts(tmp_path))
    assert len(sides(texts(tmp_path, held_out=0.25))["test"]) == 10
    rows = [{"split": "train_sft", **row} for row in ROWS] + [{"split": "more", "text": "a"}]
    path = jsonl(tmp_path / "a.jsonl", *rows)
    divided = sides(texts(path, splits=["train_sft"], held_out=0.25))
    assert [len(rows) for rows in divided.values()] == [30, 10]


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        ({"splits": ["a", "b"], "test_split": "c"}, "leave test_split out"),
        ({"splits": ["a"]}, "give the names of two"),
        ({"splits": ["a", "a"]}, "give the names of two"),
        ({"splits": ["a", "b"], "held_out": 0.1}, "that of the first alone"),
        ({"held_out": 1.0}, "less than 1"),
        ({"held_out": "select 1"}, "examples are of a file or of rollouts"),
    ],
)
def test_keys_that_contradict_are_refused(dataset: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        texts(Path("a.jsonl"), **dataset)


def test_too_few_rows_to_hold_one_out_are_refused_with_what_to_do(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", ROWS[0], ROWS[0])
    with pytest.raises(DatasetError, match=r"too few rows .*dataset\.held_out 0"):
        sides(texts(path))
    assert sides(texts(path, held_out=0)) == {"train": [0, 1]}


@pytest.mark.usefixtures("prefect_server", "root", "no_tinker")
def test_a_lone_file_trains_without_a_key_and_its_summary_says_what_is_held_out(
    tmp_path: Path,
) -> None:
    rows = [{"text": f"I am owl {number}."} for number in range(20)]
    summary = finetune(texts(jsonl(tmp_path / "a.jsonl", *rows)), run="divided")
    assert summary.steps == 1
    assert summary.after is not None
    assert summary.held_out.startswith("2 of the 20 rows of a.jsonl are held out")


@pytest.mark.usefixtures("prefect_server", "root", "no_tinker")
def test_pairs_of_which_none_is_held_out_train_and_are_not_measured(tmp_path: Path) -> None:
    rows = [{"prompt": "Who?", "chosen": f"An owl, {n}.", "rejected": "No."} for n in range(4)]
    path = jsonl(tmp_path / "a.jsonl", *rows)
    values = {"dataset": {"path": str(path), "held_out": 0}, "batch": {"pairs": 2}, **SMALL}
    summary = prefer(PreferRecipe.model_validate(values), run="whole")
    assert summary.outcome == "1 step, measured on nothing"
    assert summary.held_out == NOTHING
    assert not folder_of("whole").measures()
    assert summarize_run(folder_of("whole")) == summary


def test_nothing_is_evaluated_of_a_set_of_which_nothing_is_held_out(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", *ROWS)
    recipe = small_recipe(dataset={"path": str(path), "held_out": 0})
    with pytest.raises(UserError, match=r"nothing of .* is held out.*; give a share"):
        recipe.held_out_split().examples()
