"""The project that `ratchet init` writes, and whose recipes a command finds first."""

import asyncio
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from prefect.settings import PREFECT_API_URL
from typer.main import get_group
from typer.testing import CliRunner

from adapters.harness.agents import load_agent
from flows.cli.commands import app
from flows.cli.new_project import AGENT, ProjectExists, write_project
from flows.recipe.loading import RecipeError, named_recipe
from flows.server.prefect_server import POOL
from tests.support.prefect_api import prefect_api
from tests.support.scripted_door import scripted_door


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a new project."""
    write_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("project")
def test_the_recipe_s_examples_are_there() -> None:
    recipe = named_recipe(AGENT)
    train, held_out = (
        recipe.dataset.train_split().examples(),
        recipe.dataset.held_out_split().examples(),
    )
    assert len(train) == recipe.rollouts.groups * 8
    assert len(held_out) == recipe.evaluation.examples
    assert named_recipe("hello").agent == "hello", "an example's recipe is found as well"


@pytest.mark.usefixtures("project")
def test_the_agent_plays_and_its_test_passes() -> None:
    with scripted_door(lambda asked: asked.replace("You are", "I am")) as door:
        reward = asyncio.run(load_agent(AGENT)({"identity": "a tall cat"}, door.endpoints()))
    assert reward.value == 1.0
    defined = runpy.run_path(f"tests/test_{AGENT}.py")
    [run] = [value for name, value in defined.items() if name.startswith("test_")]
    run()


def test_the_deployments_name_flows_of_the_wheel_and_the_pool(project: Path) -> None:
    declared = yaml.safe_load((project / "prefect.yaml").read_text())["deployments"]
    assert {deployment["entrypoint"] for deployment in declared} == {
        "flows.train.train",
        "flows.evaluate.evaluate",
    }
    assert {deployment["work_pool"]["name"] for deployment in declared} == {POOL}


def test_the_readme_has_ten_lines_whose_commands_exist(project: Path) -> None:
    text = (project / "README.md").read_text()
    assert len(text.splitlines()) == 10
    named = set(re.findall(r"ratchet (\w+)", text))
    assert named <= get_group(app).commands.keys()
    assert {"dryrun", "train", "server", "deploy", "worker"} <= named


def test_a_file_of_the_user_s_is_not_written_over(tmp_path: Path) -> None:
    own = tmp_path / "agents" / f"{AGENT}.py"
    own.parent.mkdir()
    own.write_text("mine")
    with pytest.raises(ProjectExists, match=rf"agents/{AGENT}\.py would be written over; move it"):
        write_project(tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [own]
    assert own.read_text() == "mine"


def test_a_recipe_of_the_working_folder_comes_before_an_example(project: Path) -> None:
    file = project / "prefect.yaml"
    file.write_text(file.read_text().replace(f"name: {AGENT}\n", "name: hello\n"))
    assert named_recipe("hello").agent == AGENT
    with pytest.raises(RecipeError, match=f"no training deployment '{AGENT}'; .* arithmetic, "):
        named_recipe(AGENT)


@pytest.mark.usefixtures("prefect_server")
def test_what_can_be_trained_in_the_folder_can_be_deployed_from_it(project: Path) -> None:
    """The project's own recipe is called as an example is, and takes its place."""
    file = project / "prefect.yaml"
    file.write_text(file.read_text().replace(f"name: {AGENT}\n", "name: hello\n"))
    url = PREFECT_API_URL.value()
    deploy = [sys.executable, "-m", "flows.cli.main", "deploy"]
    variables = {**os.environ, "PREFECT_API_URL": url}
    said = subprocess.run(deploy, env=variables, check=True, stdout=subprocess.PIPE, text=True)
    table, _, commands = said.stdout.partition("\n\n")
    deployed = [line.split()[0] for line in table.splitlines()[1:]]
    assert {"train/hello", "train/arithmetic", f"evaluate/{AGENT}-evaluation"} <= {*deployed}
    assert len(deployed) == len({*deployed})
    assert max(map(len, table.splitlines())) <= 100
    assert "deployment run train/" in commands
    with prefect_api(url) as api:
        for name, agent in {"hello": AGENT, "arithmetic": "arithmetic"}.items():
            deployed = api.get(f"/deployments/name/train/{name}").json()
            assert deployed["parameters"]["recipe"]["agent"] == agent
            [step] = deployed["pull_steps"]
            assert [*step.values()] == [{"directory": str(project)}]
            created = api.post(f"/deployments/{deployed['id']}/create_flow_run", json={})
            assert created.status_code == 201, created.text
            api.delete(f"/flow_runs/{created.json()['id']}")


def test_init_says_what_it_has_written(tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["init", str(tmp_path / "mine")])
    assert said.exit_code == 0
    assert str(tmp_path / "mine" / "prefect.yaml") in said.output.splitlines()
    assert f"`ratchet dryrun {AGENT}`" in said.output


def test_a_folder_without_deployments_is_not_deployed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=r"no prefect.yaml in .*; `ratchet init` writes one"):
        app(["deploy"])
