"""Ratchet in a folder with modules called as its packages are: it works, or says so at once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flows import PACKAGES
from tests.support.processes import ROOT

COMMAND = Path(sys.executable).parent / "ratchet"
CLASHES = {f"{name}.py" for name in PACKAGES} | {"tasks/__init__.py"}


def run(folder: Path, *words: str | Path, first: bool = False) -> tuple[int, str]:
    """Run a program in a folder, which comes first on Python's path if that is said."""
    path = f"{folder}{os.pathsep}{ROOT}" if first else str(ROOT)
    ran = subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return ran.returncode, ran.stdout


def write(folder: Path, clash: str) -> None:
    (folder / clash).parent.mkdir(exist_ok=True)
    (folder / clash).write_text("VALUE = 1\n")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project whose agent imports its own `tasks`."""
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "hello.py").write_text(
        "import tasks\n\n\nasync def play(example, **_):\n    return tasks.VALUE\n"
    )
    return tmp_path


@pytest.mark.parametrize("clash", ["tasks.py", "tasks/__init__.py"])
def test_train_says_in_a_sentence_that_the_agent_s_import_would_be_ours(
    project: Path, clash: str
) -> None:
    write(project, clash)
    status, said = run(project, COMMAND, "train", "hello")
    assert status == 2
    place = project / "tasks.py" if clash == "tasks.py" else project / "tasks"
    assert said == (
        f"ratchet: the agent {project}/agents/hello.py imports {place}, and would get Ratchet's "
        "own package 'tasks'; rename yours, or move it into a package\n"
    )
    assert not (project / "runs").exists()


def test_pytest_tests_an_agent_that_imports_the_user_s_own_module(project: Path) -> None:
    write(project, "tasks.py")
    (project / "test_hello.py").write_text(
        "import sys\nsys.path.insert(0, 'agents')\nimport hello\n\n\n"
        "def test_its_tasks() -> None:\n    assert hello.tasks.VALUE == 1\n"
    )
    status, said = run(project, sys.executable, "-m", "pytest", "-p", "no:cacheprovider")
    assert status == 0, said


@pytest.mark.parametrize("clash", sorted(CLASHES | {"flows.py"}))
def test_the_library_refuses_to_be_imported_from_halves(tmp_path: Path, clash: str) -> None:
    write(tmp_path, clash)
    status, said = run(tmp_path, sys.executable, "-c", "import ratchet")
    assert status == 1, said
    named = clash.removesuffix("/__init__.py")
    last = said.splitlines()[-1]
    assert last.startswith(f"ImportError: Python finds {tmp_path / named} in place of Ratchet's")
    assert "rename yours, or take its folder from the front" in last


def test_a_test_of_the_user_s_that_imports_the_library_is_told(tmp_path: Path) -> None:
    write(tmp_path, "tasks.py")
    (tmp_path / "test_mine.py").write_text("import ratchet\n")
    status, said = run(tmp_path, sys.executable, "-m", "pytest", "-p", "no:cacheprovider")
    assert status == 2, said
    assert f"ImportError: Python finds {tmp_path}/tasks.py in place of Ratchet's own" in said


def test_a_folder_first_on_the_path_is_refused_in_a_sentence(tmp_path: Path) -> None:
    write(tmp_path, "engine.py")
    status, said = run(tmp_path, COMMAND, "runs", first=True)
    assert status == 2
    [line] = said.splitlines()
    assert line.startswith(f"ratchet: Python finds {tmp_path}/engine.py in place of Ratchet's own")
    assert run(tmp_path, COMMAND, "runs")[0] == 0, "and is in nobody's way behind"


@pytest.mark.parametrize("command", ["deploy", "worker"])
def test_what_prefect_would_import_from_the_folder_is_refused(tmp_path: Path, command: str) -> None:
    write(tmp_path, "flows.py")
    (tmp_path / "prefect.yaml").write_text("deployments: []\n")
    status, said = run(tmp_path, COMMAND, command)
    assert status == 2
    assert said.startswith(f"ratchet: Prefect would import {tmp_path}/flows.py in place of")
