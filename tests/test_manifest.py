"""A run's folder belongs to one recipe, and to one process at a time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.storage.run_folder import RunError, folder_of, latest_run, named, opened_run, recipe_of

RECIPE = {
    "agent": "hello",
    "dataset": {"path": __file__},
    "roles": {},
    "optimizer": {"learning_rate": 0.1},
}


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path))
    return tmp_path


def test_the_manifest_says_what_the_run_depends_on(root: Path) -> None:
    with opened_run("one", RECIPE, "f00d") as folder:
        manifest = json.loads((folder / "manifest.json").read_text())
    assert folder == root / "one"
    assert recipe_of(folder) == RECIPE
    assert manifest["fingerprint"] == "f00d"
    assert len(manifest["dataset_sha256"]) == 64
    assert manifest["versions"]["tinker"] == "0.38.0"


def test_another_recipe_is_refused_with_what_differs() -> None:
    with opened_run("one", RECIPE, "f00d"):
        pass
    other = {**RECIPE, "optimizer": {"learning_rate": 0.2}}
    with (
        pytest.raises(RunError, match=r"optimizer.learning_rate: 0.1 → 0.2"),
        opened_run("one", other, "beef"),
    ):
        pass


def test_a_second_process_is_refused_with_the_first_ones_name(root: Path) -> None:
    program = (
        "from tasks.storage.run_folder import opened_run\n"
        f"with opened_run('one', {RECIPE!r}, 'f00d'): print('open', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"open\n"
        with (
            pytest.raises(RunError, match=f"process {first.pid} on "),
            opened_run("one", RECIPE, "f00d"),
        ):
            pass
        first.kill()
    with opened_run("one", RECIPE, "f00d"):
        pass  # a lock whose owner was killed is not in the way


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden"])
def test_a_name_that_leaves_the_folder_is_refused(name: str) -> None:
    with pytest.raises(RunError, match="cannot name a run"), opened_run(name, RECIPE, "f00d"):
        pass


def test_any_agent_can_name_a_run() -> None:
    name = named("command:python agents/x.py --fast", "1f")
    assert name == "command-python-agents-x.py-fast-1f"
    assert folder_of(name).name == name


def test_the_newest_run_of_an_agent_is_found(root: Path) -> None:
    for name in ("b", "a"):
        with opened_run(name, RECIPE, "f00d"):
            pass
    assert latest_run("hello", {}) == root / "a"
    with pytest.raises(RunError, match="no run of the agent 'arithmetic'; train"):
        latest_run("arithmetic", {})


def test_the_newest_run_of_an_agent_has_the_same_roles_whoever_helps_in_them(root: Path) -> None:
    for name, roles in {
        "one": {"teller": "policy", "judge": "function:package.module:name"},
        "two": {"teller": "policy:teller", "judge": "function:package.module:name"},
        "three": {},
    }.items():
        with opened_run(name, {**RECIPE, "roles": roles}, "f00d"):
            pass
    assert latest_run("hello", {"teller": "policy", "judge": "openai/gpt-4o-mini"}) == root / "one"
    assert latest_run("hello", {"teller": "policy:teller", "judge": "openai/o"}) == root / "two"
    with pytest.raises(RunError, match="no run of the agent 'hello' with the roles teller; train"):
        latest_run("hello", {"teller": "policy"})


def test_a_run_that_is_not_there_is_said_to_be_missing(root: Path) -> None:
    with pytest.raises(RunError, match="there is no run at"):
        recipe_of(root / "none")
