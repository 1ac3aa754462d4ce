"""Commands of the documents: each recipe that they name exists, and takes what they set."""

import json
import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from flows.recipe.loading import named_recipe
from flows.recipe.recipe import Recipe
from flows.runtime.checks import check_recipe

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "datasets" / "README.md", *(ROOT / "docs").glob("*.md")]
COMMAND = re.compile(r"^ +(?:\.venv/bin/)?ratchet (?:train|dryrun|evaluate) ([a-z][^#\n]*)", re.M)
PARAMETER = re.compile(r"--param 'recipe=([^']+)'")
OF_THE_READER = re.compile(r"riddles|introduce|\S+\.yaml")
"""Recipes that a reader of the documents writes."""


def commands() -> list[str]:
    found = [line for file in DOCUMENTS for line in COMMAND.findall(file.read_text("utf-8"))]
    return [*dict.fromkeys(line.strip() for line in found if not OF_THE_READER.match(line))]


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_documents_has_a_recipe_that_takes_its_settings(command: str) -> None:
    name, *words = shlex.split(command)
    settings = [value for word, value in pairwise(words) if word == "--set"]
    recipe = named_recipe(name, settings)
    assert (recipe == named_recipe(name)) == (not settings)


def parameters() -> list[str]:
    """Return the recipes that the documents give to a deployment on the command line."""
    return [text for file in DOCUMENTS for text in PARAMETER.findall(file.read_text("utf-8"))]


@pytest.mark.parametrize("parameter", parameters())
def test_a_recipe_that_is_given_to_a_deployment_can_be_trained(parameter: str) -> None:
    recipe = Recipe.model_validate_json(parameter)
    check_recipe(recipe)
    assert recipe.model_dump(mode="json", exclude_unset=True) == json.loads(parameter)


def test_the_documents_have_commands() -> None:
    assert len(commands()) >= 20
    assert parameters()
