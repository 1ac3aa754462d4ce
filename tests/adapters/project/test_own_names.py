"""Modules of the user's that are called as Ratchet's packages: an agent's imports of them."""

import asyncio
import sys
from pathlib import Path

import pytest

from adapters.clients.current_rollout import Endpoint
from adapters.harness.agents import load_agent
from adapters.project import modules
from adapters.project.modules import OWN, NameTaken, check_folder
from tests.support.processes import ROOT

PLAY = "async def play(example, **_):\n    return 1.0\n"
NOWHERE = {"policy": Endpoint(base_url="http://127.0.0.1:1/v1", api_key="key", model="policy")}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with an empty `agents/`, of which nothing stays imported."""
    (tmp_path / "agents").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if Path(path or ".") != ROOT])
    monkeypatch.setattr(modules, "_FINDER", modules._ProjectFinder())
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    return tmp_path


def write(file: Path, text: str) -> Path:
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    return file


def test_the_names_are_those_of_the_wheel_s_packages() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    [line] = [line for line in text.splitlines() if line.startswith("packages = ")]
    assert sorted(eval(line.removeprefix("packages = "))) == [*OWN]


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("place", ["{}.py", "{}/__init__.py", "{}/games.py", "agents/{}.py"])
def test_an_agent_that_imports_a_module_called_as_ours_is_refused(
    project: Path, name: str, place: str
) -> None:
    file = write(project / place.format(name), "VALUE = 1\n")
    write(project / "agents" / "own.py", f"from {name} import VALUE\n{PLAY}")
    with pytest.raises(NameTaken, match="rename yours, or move it into a package") as refused:
        load_agent("own")
    found = file if place in ("{}.py", "agents/{}.py") else file.parent
    assert f"agents/own.py imports {found}, and would get Ratchet's own" in str(refused.value)


@pytest.mark.parametrize("clash", ["tasks.py", "tasks/__init__.py"])
def test_the_import_is_found_through_modules_of_the_user_s(project: Path, clash: str) -> None:
    write(project / clash, "VALUE = 1\n")
    write(project / "agents" / "beside.py", "def late():\n    import games.riddles\n")
    write(project / "games" / "__init__.py", "")
    write(project / "games" / "riddles.py", "import tasks.further as further\n")
    write(project / "agents" / "own.py", f"import beside\n{PLAY}")
    for name in ("own", "own:play", "games.riddles:play", "tasks:play"):
        with pytest.raises(NameTaken, match="/tasks"):
            load_agent(name)


def test_a_module_that_no_agent_imports_is_in_nobody_s_way(project: Path) -> None:
    for name in OWN:
        write(project / f"{name}.py", "raise SystemExit\n")
    write(project / "agents" / "own.py", f"import mine\nimport mine.tasks\n{PLAY}")
    write(project / "mine" / "__init__.py", "from . import tasks\n")
    write(project / "mine" / "tasks.py", "VALUE = 1\n")
    assert asyncio.run(load_agent("own")({}, NOWHERE)).value == 1.0


@pytest.mark.parametrize("name", ["agents", "datasets"])
def test_packages_called_agents_and_datasets_are_the_user_s(project: Path, name: str) -> None:
    write(project / name / "__init__.py", "VALUE = 0.25\n")
    play = PLAY.replace("1.0", "VALUE")
    write(project / "agents" / "own.py", f"from {name} import VALUE\n{play}")
    check_folder()
    assert asyncio.run(load_agent("own")({}, NOWHERE)).value == 0.25


@pytest.mark.parametrize("name", OWN)
def test_a_folder_that_prefect_would_import_from_is_refused(project: Path, name: str) -> None:
    (project / name).mkdir()
    check_folder()  # a folder that is no package comes last
    write(project / name / "__init__.py", "")
    with pytest.raises(NameTaken, match=f"Prefect would import .*/{name} in place of"):
        check_folder()
