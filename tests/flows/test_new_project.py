"""The project that `ratchet init` writes, and whose recipes a command finds first."""

import asyncio
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.main import get_group
from typer.testing import CliRunner

from ratchet.adapters.clients.current_rollout import Endpoint
from ratchet.adapters.errors import UserError
from ratchet.adapters.harness.agents import load_agent
from ratchet.adapters.places.filling import fill
from ratchet.adapters.places.place import Place
from ratchet.flows.cli.commands import app
from ratchet.flows.cli.new_project import AGENT, PROJECT_KINDS, Kind, write_project
from ratchet.flows.recipe.loading import RecipeError, named_recipe
from ratchet.flows.recipe.run_recipe import RunRecipe
from ratchet.tasks.settings.rollouts import PlaceOfRollouts
from tests.support.door.scripted_door import scripted_door


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a new project."""
    write_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


WITH_AGENTS = [name for name, kind in PROJECT_KINDS.items() if kind.agent_is]
PROGRAMS = [name for name in WITH_AGENTS if PROJECT_KINDS[name].install]
"""Kinds whose agent is a program of a package index; of the others the project has the agent."""
of_own_agents = pytest.mark.parametrize(
    "kind", [name for name in WITH_AGENTS if name not in PROGRAMS], indirect=True
)
of_programs = pytest.mark.parametrize("kind", PROGRAMS, indirect=True)


@pytest.fixture(params=WITH_AGENTS)
def kind(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kind:
    """A kind of project; the working folder has a new one of it."""
    for module in PROJECT_KINDS[request.param].needs or ():
        pytest.importorskip(module, reason=f"{module} is not installed: make setup")
    write_project(tmp_path, request.param)
    monkeypatch.chdir(tmp_path)
    return PROJECT_KINDS[request.param]


def test_the_recipe_s_examples_are_there(kind: Kind) -> None:
    recipe = named_recipe(kind.name)
    train, held_out = (recipe.train_split().examples(), recipe.held_out_split().examples())
    assert len(train) == recipe.rollouts.groups * 8
    assert len(held_out) == recipe.evaluation.examples
    assert named_recipe("hello").agent == "hello", "an example's recipe is found as well"


@of_own_agents
def test_the_agent_plays(kind: Kind) -> None:
    recipe = named_recipe(kind.name)
    example = recipe.held_out_split().examples()[0]["example"]

    def answer(asked: str) -> str:
        return asked.replace("You are", "I am") if "You are" in asked else "\\boxed{1}"

    with scripted_door(answer) as door:
        reward = asyncio.run(load_agent(recipe.agent)(example, door.endpoints()))
    assert reward.value == 1.0 or len(reward.calls["policy"]) > 1, reward


@pytest.mark.usefixtures("kind")
def test_the_project_s_test_passes_without_anything_of_ours() -> None:
    """A package of ours is not importable there at all."""
    [file] = Path("tests").iterdir()
    assert not re.search("(adapters|engine|flows|pretraining|tasks)", file.read_text())
    pytest_there = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider"]
    ran = subprocess.run(pytest_there, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "passed" in ran.stdout


def test_the_readme_s_commands_and_files_exist(kind: Kind) -> None:
    text = Path("README.md").read_text()
    assert {*re.findall(r"ratchet (\w+)", text)} <= get_group(app).commands.keys()
    files = {file for file in re.findall(r"`([a-z]+[/.][\w/.-]+)`", text) if "RUN" not in file}
    assert {f"datasets/{kind.dataset}", "prefect.yaml"} <= files
    assert all(Path(file).exists() for file in files)


def test_a_key_among_the_words_of_a_command_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    place = PlaceOfRollouts(kept="never")
    recipe = named_recipe("hello").model_copy(update={"place": place})
    for words in ("--quiet", "--key ${OPENAI_API_KEY}", "--key ${OPENAI_API_KEY}"):
        recipe.model_copy(update={"agent": f"command:{sys.executable} {words}"}).check()
    assert caplog.text.count("the agent's words have ${OPENAI_API_KEY}: whoever may list") == 1


@of_programs
def test_a_place_has_the_address_the_key_and_the_model_where_the_program_looks(kind: Kind) -> None:
    recipe = named_recipe(kind.name)
    settings = recipe.place.of(Path("places").absolute())
    assert settings is not None
    roles = {"policy": Endpoint(base_url="http://127.0.0.1:9/v1", api_key="a-key", model="a-model")}
    row = recipe.train_split().examples()[0]["example"]
    place = Place(replace(settings, caged=False), "a-rollout", row)
    variables = place.variables(roles)
    fill(place, variables)
    told = [*variables.items(), *((str(path), path.read_text()) for path in files_of(place.home))]
    further = [
        text for name, text in told if not name.startswith("OPENAI_") or name == "OPENAI_API_BASE"
    ]
    words = [place.fill_in(word, variables, "") for word in split_words(recipe.agent)]
    assert row["task"] in words
    for value in ("http://127.0.0.1:9/v1", "a-model"):
        assert any(value in text for text in (*further, *words)), value
    assert [text for text in (*further, *words) if "${" in text] == []


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def split_words(agent: str) -> list[str]:
    return shlex.split(agent.partition(":")[2])


@pytest.mark.parametrize("name", [name for name in PROJECT_KINDS if name not in WITH_AGENTS])
def test_a_project_without_an_agent_has_a_recipe_rows_and_a_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    write_project(tmp_path, name)
    monkeypatch.chdir(tmp_path)
    recipe = named_recipe(AGENT, kind=RunRecipe)
    assert recipe.flow == name
    assert [len(rows.examples()) for rows in recipe.sources().values()] == [64, 16]
    recipe.check()
    [deployment] = yaml.safe_load(Path("prefect.yaml").read_text())["deployments"]
    assert deployment["entrypoint"] == f"ratchet.flows.{name}.{name}"
    text = Path("README.md").read_text()
    assert set(re.findall(r"ratchet (\w+)", text)) <= get_group(app).commands.keys()
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    said = CliRunner().invoke(app, ["init", "--kind", name, str(tmp_path / "other")])
    assert f"`ratchet train {AGENT}`" in said.output


def test_an_unknown_kind_gets_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"no kind of project 'residents'; .* did you mean 'resident'"
    ):
        write_project(tmp_path, "residents")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(("kind", "package"), [("crewai", "crewai"), ("gem", "gem-llm")])
def test_a_kind_whose_package_is_missing_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, package: str
) -> None:
    apart = [path for path in sys.path if "site-packages" not in path]
    monkeypatch.setattr(sys, "path", apart)
    for module in PROJECT_KINDS[kind].needs or ():
        monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(UserError, match="not installed here; give `pip install") as refused:
        write_project(tmp_path, kind)
    assert [*tmp_path.iterdir()] == []
    [pins] = re.findall("--constraint ([^ ]+)", str(refused.value))
    assert re.search(rf"^{package}==", Path(pins).read_text(), re.M)


def test_a_file_of_the_user_s_is_not_written_over(tmp_path: Path) -> None:
    own = tmp_path / "agents" / f"{AGENT}.py"
    own.parent.mkdir()
    own.write_text("mine")
    with pytest.raises(UserError, match=rf"agents/{AGENT}\.py would be written over; move it"):
        write_project(tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [own]
    assert own.read_text() == "mine"
    (tmp_path / "prefect.yaml").write_text("mine")
    with pytest.raises(UserError, match=r"prefect\.yaml would be written over; move them"):
        write_project(tmp_path)


def test_a_recipe_of_the_working_folder_comes_before_an_example(project: Path) -> None:
    file = project / "prefect.yaml"
    file.write_text(file.read_text().replace(f"name: {AGENT}\n", "name: hello\n"))
    assert named_recipe("hello").agent == AGENT
    with pytest.raises(RecipeError, match=f"no training deployment '{AGENT}'; .* arithmetic, "):
        named_recipe(AGENT)


def test_a_folder_without_deployments_is_not_deployed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=r"no prefect.yaml in .*; `ratchet init` writes one"):
        app(["deploy"])


def test_the_pins_are_printed_as_pip_reads_them() -> None:
    printed = CliRunner().invoke(app, ["pins"])
    assert printed.stdout == Path("constraints.txt").read_text("utf-8")
