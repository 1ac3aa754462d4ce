"""Data sets as the field publishes them: their datums decode to what the rows say."""

from pathlib import Path

import pyarrow.compute as pc
import pytest
import yaml
from typer.testing import CliRunner

from ratchet.adapters.rendering.chat import Chat
from ratchet.adapters.tinker.bases import open_tokenizer
from ratchet.flows.cli.commands import app
from ratchet.flows.recipe.given_examples import GivenRecipe
from ratchet.flows.recipe.given_recipes import FinetuneRecipe
from ratchet.flows.recipe.loading import named_recipe
from ratchet.flows.recipe.run_recipe import RunRecipe
from ratchet.tasks.given.given import bind_given
from ratchet.tasks.recording.step_log import read_metrics
from ratchet.tasks.storage.run_folder import RunFolder, folder_of
from ratchet.tasks.storage.tables import arrays, read_table
from tests.support.published_sets import SETS

END = "<|im_end|>"


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(open_tokenizer("local/tiny-chat"))


def recipe_file(name: str, folder: Path) -> tuple[Path, list[str]]:
    """Write a set and a recipe without it; return the recipe and what names the set to it."""
    published = SETS[name]
    of_flow = {"finetune": {"batch": {"examples": 2}}, "prefer": {"batch": {"pairs": 2}}}
    recipe = {
        "flow": published.flow,
        "steps": 1,
        "model": {"lora_rank": 4},
        "optimizer": {"learning_rate": 0.001},
        "dataset": {"path": "given", **published.dataset},
        **of_flow[published.flow],
        **published.recipe,
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path, [f"dataset.path={published.write(folder)}"]


def trained_texts(recipe: RunRecipe, chat: Chat, folder: Path) -> list[str]:
    """Return the texts that the datums of a recipe train, each without its end."""
    assert isinstance(recipe, GivenRecipe)
    units = recipe.units(RunFolder(folder))
    bind_given.make(units.path, units, recipe.given_examples(), chat, recipe.dataset)
    weights = "weights" if isinstance(recipe, FinetuneRecipe) else "mask"
    rows = read_table(units.path).filter(pc.field("split") == "train")
    if weights == "mask":
        rows = rows.filter(pc.field("side") != "mismatched")
    said: list[str] = []
    for tokens, own in zip(arrays(rows["tokens"]), arrays(rows[weights]), strict=True):
        text = chat.text([token for token, one in zip(tokens, own, strict=True) if one > 0])
        said += [part for part in text.split(END) if part]
    return said


@pytest.mark.parametrize("name", SETS)
def test_a_published_set_s_datums_decode_to_the_right_texts(
    chat: Chat, tmp_path: Path, name: str
) -> None:
    path, given = recipe_file(name, tmp_path)
    found = trained_texts(named_recipe(str(path), given, RunRecipe), chat, tmp_path)
    assert len(found) == len(SETS[name].trained)
    for text, right in zip(found, SETS[name].trained, strict=True):
        assert text == right or (right == "I look." and text.startswith(right))


@pytest.mark.story
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("prefect_server", "no_tinker", "root")
@pytest.mark.parametrize("name", ["tools", "KTO", "HH", "GSM8K"])
def test_a_published_set_trains_by_one_command(tmp_path: Path, name: str) -> None:
    path, given = recipe_file(name, tmp_path)
    run = "".join(letter for letter in name.lower() if letter.isalnum())
    said = CliRunner().invoke(app, ["train", str(path), "--set", *given, "--run", run])
    assert said.exit_code == 0, said.output
    assert len(read_metrics(folder_of(run).metrics)) == 1
