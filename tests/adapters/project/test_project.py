"""The files of a project: agents are loaded from a folder, which is no package to anybody."""

import asyncio
import importlib
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from ratchet.adapters.calls import POLICY
from ratchet.adapters.clients.current_rollout import Endpoint
from ratchet.adapters.door.backends import load_function
from ratchet.adapters.harness.agents import load_agent
from ratchet.adapters.project import modules
from ratchet.adapters.project.modules import (
    EXAMPLES,
    AgentError,
    load_agent_file,
    load_module,
    locate,
)

ENDPOINTS = {POLICY: Endpoint(base_url="http://127.0.0.1:1/v1", api_key="key", model="policy")}
ROOT = Path(__file__).parents[3]
PAYS = "async def play(example, **_):\n    return {}\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder, of which nothing is imported when the test is over."""
    for folder in ("agents", "datasets", "docs"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path)
    entries = [entry for entry in sys.path if not (Path(entry) / "docs").is_dir()]
    monkeypatch.setattr(sys, "path", entries)
    monkeypatch.setattr(modules, "_FINDER", modules._ProjectFinder())
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    return tmp_path


def reward(name: str) -> float | None:
    return asyncio.run(load_agent(name)({}, ENDPOINTS)).value


def test_an_agent_of_the_working_folder_comes_before_an_example(project: Path) -> None:
    assert load_agent_file("hello").__file__ == str((EXAMPLES / "agents" / "hello.py").resolve())
    (project / "agents" / "hello.py").write_text(PAYS.format(0.25))
    assert reward("hello") == reward("hello:play") == 0.25


def test_a_module_that_can_be_imported_comes_before_an_example(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "hello", raising=False)
    (project / "hello.py").write_text(PAYS.format(0.5))
    assert reward("hello:play") == 0.5
    assert load_agent_file("hello").__file__ == str((EXAMPLES / "agents" / "hello.py").resolve())


def test_an_agent_can_import_a_package_called_agents(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The OpenAI Agents SDK is one."""
    sdk = project / "site-packages" / "agents"
    sdk.mkdir(parents=True)
    (sdk / "__init__.py").write_text("REWARD = 0.75\n")
    monkeypatch.syspath_prepend(str(sdk.parent))
    text = "import agents\n\n" + PAYS.format("agents.REWARD")
    (project / "agents" / "agents.py").write_text(text)
    assert reward("agents") == 0.75


def test_two_agents_import_a_module_that_lies_beside_them(project: Path) -> None:
    (project / "agents" / "rules_of_both.py").write_text("REWARD = 0.125\n")
    for name in ("one", "two"):
        text = "import rules_of_both\n\n" + PAYS.format("rules_of_both.REWARD")
        (project / "agents" / f"{name}.py").write_text(text)
        assert reward(name) == 0.125


def test_an_agent_s_name_does_not_hide_an_installed_package(project: Path) -> None:
    text = "import openai\n\n" + PAYS.format("float(hasattr(openai, 'AsyncOpenAI'))")
    (project / "agents" / "openai.py").write_text(text)
    assert reward("openai") == 1.0
    assert importlib.import_module("openai").__file__ != str(project / "agents" / "openai.py")


@pytest.mark.parametrize("own", ["shadowed.py", "shadowed/__init__.py"])
def test_a_module_of_the_working_folder_comes_before_an_installed_one(
    project: Path, monkeypatch: pytest.MonkeyPatch, own: str
) -> None:
    """The package index has an `adapters`, for one; the standard library's stay its own."""
    for file, earned in (("site-packages/shadowed.py", 0.25), (own, 0.75), ("json.py", 0.5)):
        (project / file).parent.mkdir(exist_ok=True)
        (project / file).write_text(f"REWARD = {earned}\n")
    monkeypatch.syspath_prepend(str(project / "site-packages"))
    monkeypatch.delitem(sys.modules, "json")
    text = "import json\nimport shadowed\n\njson.loads\n\n" + PAYS.format("shadowed.REWARD")
    (project / "agents" / "own.py").write_text(text)
    assert reward("own") == 0.75


def test_a_module_beside_an_agent_is_found_when_the_working_folder_is_gone(project: Path) -> None:
    """An agent may change to a folder of its own, and remove it."""
    text = "import os\n\nos.mkdir('gone')\nos.chdir('gone')\nos.rmdir('../gone')\nimport beside\n\n"
    (project / "agents" / "beside.py").touch()
    (project / "agents" / "moves.py").write_text(text + PAYS.format(0.5))
    assert reward("moves") == 0.5


def test_a_role_is_answered_by_a_function_of_an_agent_s_file(project: Path) -> None:
    (project / "agents" / "judges.py").write_text("def strict(messages, example): ...\n")
    assert load_function("judge", "judges:strict")
    assert load_function("judge", "twenty_questions_answers:answer")


def test_the_working_folder_s_folders_are_no_packages_to_a_library(project: Path) -> None:
    (project / "docs" / "a.py").touch()
    load_module("no_such_module")
    assert find_spec("docs") is None


def test_a_recipe_can_name_a_function_of_the_working_folder(project: Path) -> None:
    (project / "games").mkdir()
    (project / "games" / "__init__.py").touch()
    (project / "beside_games.py").write_text("REWARD = 0.5\n")
    text = "import beside_games\n\n" + PAYS.format("beside_games.REWARD")
    (project / "games" / "guess.py").write_text(text)
    assert reward("games.guess:play") == 0.5
    (project / "docs" / "example.py").write_text(PAYS.format(0.25))
    assert reward("docs.example:play") == 0.25


def test_a_missing_import_of_an_agent_s_file_is_not_a_missing_agent(project: Path) -> None:
    (project / "agents" / "lacking.py").write_text("import no_such_library\n")
    for _ in range(2):
        with pytest.raises(AgentError, match=r"ModuleNotFoundError: .*no_such_library"):
            load_agent("lacking")


def test_a_dataset_of_the_working_folder_comes_before_an_example(project: Path) -> None:
    hello, own = Path("datasets/hello.csv"), Path("datasets/own.csv")
    assert locate(hello) == EXAMPLES / hello
    (project / hello).touch()
    assert (locate(hello), locate(own)) == (project / hello, project / own)
