"""Commands of the documents: `ratchet` accepts each, whose recipe exists and takes what is set."""

import json
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from string import Template
from typing import Any

import pytest
import typer
from typer.core import TyperGroup
from typer.main import get_command

from ratchet.flows.cli.commands import LateCommand, app
from ratchet.flows.recipe.loading import named_recipe
from ratchet.flows.recipe.recipe import Recipe
from ratchet.flows.recipe.run_recipe import FlowRecipe

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "datasets" / "README.md", *(ROOT / "docs").glob("*.md")]
COMMAND = re.compile(
    r"^ +(?:\.venv/bin/)?ratchet (?:train|dryrun|evaluate) ([a-z](?:[^#\n]|(?<! )#)*)", re.M
)
LINE = re.compile(r"^ *(?:\S+=\S+ )*(?:\.venv/bin/)?ratchet ([a-z].*)$", re.M)
QUOTED = re.compile(r"`(?:\.venv/bin/)?ratchet ([a-z][^`]*)`")
"""A command in a sentence, which may leave out what the sentence is not about."""
PARAMETER = re.compile(r"--param 'recipe=([^']+)'")
TEMPLATES = ROOT / "flows" / "cli" / "template"
PROJECTS = {"every": "introduce", "chores": "chores"}
"""Folder of a README of `ratchet init` → the recipe that it names."""
OF_THE_READER = re.compile(r"riddles|introduce|chores|\S+\.yaml")
"""Recipes that a reader of the documents writes."""


def found_by(pattern: re.Pattern[str]) -> list[str]:
    """Return the commands of the documents, each on one line."""
    texts = [file.read_text("utf-8").replace("\\\n", "") for file in DOCUMENTS]
    for folder, name in PROJECTS.items():
        readme = Template((TEMPLATES / folder / "README.md").read_text("utf-8"))
        texts.append(readme.safe_substitute(name=name))
    found = [command for text in texts for command in pattern.findall(text)]
    return [*dict.fromkeys(" ".join(command.split()) for command in found)]


def leaves(command: TyperGroup, *groups: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, one in command.commands.items():
        names = (*groups, name)
        yield from leaves(one, *names) if isinstance(one, TyperGroup) else [(names, one)]


def parse(words: list[str]) -> list[tuple[str, ...]]:
    """Have the program read a command, whose function does nothing; return which it calls."""
    program: Any = get_command(app)
    called: list[tuple[str, ...]] = []
    for names, command in leaves(program):
        loaded = command.load() if isinstance(command, LateCommand) else command
        loaded.callback = lambda names=names, **_: called.append(names)
        command.load = lambda loaded=loaded: loaded
    program.main(words, prog_name="ratchet", standalone_mode=False)
    return called


@pytest.mark.parametrize("command", found_by(LINE))
def test_a_command_of_the_documents_is_accepted(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # one reads a file of the repository
    monkeypatch.setenv("RATCHET_RUNS", "runs")  # the address of a run names another one
    words = shlex.split(command, comments=True)
    if "--say" in words:  # it names a file of the reader's
        words[words.index("--say") + 1] = __file__
    [called] = parse(words)
    assert called == tuple(words[: len(called)])


@pytest.mark.parametrize("command", found_by(QUOTED))
def test_a_command_in_a_sentence_has_a_name_and_options_that_there_are(command: str) -> None:
    words = shlex.split(command)
    called: list[tuple[str, ...]] = []
    with suppress(typer.BadParameter):  # what a value is, and whether it is given
        called = parse(words)
    assert all(names == tuple(words[: len(names)]) for names in called)


def commands() -> list[str]:
    found = [line for file in DOCUMENTS for line in COMMAND.findall(file.read_text("utf-8"))]
    return [*dict.fromkeys(line.strip() for line in found if not OF_THE_READER.match(line))]


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_documents_has_a_recipe_that_takes_its_settings(command: str) -> None:
    name, *words = shlex.split(command)
    settings = [value for word, value in pairwise(words) if word == "--set"]
    recipe = named_recipe(name, settings, FlowRecipe)
    assert (recipe == named_recipe(name, (), FlowRecipe)) == (not settings)


def parameters() -> list[str]:
    """Return the recipes that the documents give to a deployment on the command line."""
    return [text for file in DOCUMENTS for text in PARAMETER.findall(file.read_text("utf-8"))]


@pytest.mark.parametrize("parameter", parameters())
def test_a_recipe_that_is_given_to_a_deployment_can_be_trained(parameter: str) -> None:
    recipe = Recipe.model_validate_json(parameter)
    recipe.check()
    assert recipe.model_dump(mode="json", exclude_unset=True) == json.loads(parameter)


def test_the_documents_have_commands() -> None:
    assert len(found_by(LINE)) >= 20
    assert len(found_by(QUOTED)) >= 10
    assert len(commands()) >= 10
    assert parameters()
