"""Rerunning from the command line: a run that exists, one that was cut off, a fork, a replay."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from prefect.settings import PREFECT_API_URL

from ratchet.flows.cli.commands import app
from ratchet.flows.cli.main import plain_errors
from tests.support.runs.small_recipe import small_recipe, with_faults

ROOT = Path(__file__).parents[2]
RECIPE = {"rollouts": {"groups": 2, "group_size": 2, "max_tokens": 8}}

pytestmark = [pytest.mark.story, pytest.mark.usefixtures("prefect_server", "no_tinker")]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose one agent ends the process in the second step of its first run."""
    folder = tmp_path_factory.mktemp("project")
    recipe = small_recipe(**RECIPE, **with_faults(folder, "exit")).model_dump(mode="json")
    train = {"name": "faulty", "entrypoint": "ratchet.flows.train.train"}
    deployments = [{**train, "parameters": {"recipe": recipe}}]
    (folder / "prefect.yaml").write_text(json.dumps({"deployments": deployments}))
    return folder


def environment(project: Path) -> dict[str, str]:
    """Of a process of its own, with the server that the tests have started."""
    return {
        **os.environ,
        "PREFECT_API_URL": str(PREFECT_API_URL.value()),
        "PYTHONPATH": str(ROOT),
        "RATCHET_RUNS": str(project / "runs"),
    }


class Said(NamedTuple):
    code: int
    stdout: str
    stderr: str


@pytest.fixture
def ratchet(
    resumed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> "Ratchet":
    """The console script, in this process."""
    monkeypatch.chdir(resumed)
    monkeypatch.setenv("RATCHET_RUNS", str(resumed / "runs"))
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*arguments: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["ratchet", *arguments])
        with pytest.raises(SystemExit) as ended, plain_errors():
            app()
        code, said = ended.value.code, capsys.readouterr()
        return Said(code if isinstance(code, int) else 0, said.out, said.err)

    return run


Ratchet = Callable[..., Said]


def alone(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "ratchet.flows.cli.main", *arguments],
        cwd=project,
        env=environment(project),
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


def metrics(project: Path, run: str) -> list[str]:
    path = project / "runs" / run / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


@pytest.fixture(scope="module")
def resumed(project: Path, prefect_server: None, no_tinker: None) -> Path:
    """A run whose agent ended the process with os._exit, and that was then resumed."""
    ended = alone(project, "train", "faulty", "--run", "one")
    assert ended.returncode == 7, ended.stderr
    assert len(metrics(project, "one")) == 1

    said = alone(project, "resume", "one")
    assert said.returncode == 0, said.stderr
    assert "held-out reward" in said.stdout
    assert "leaked" not in said.stderr, "DuckDB complains of what is left at the end of a process"
    return project


def test_a_run_whose_agent_ended_the_process_is_resumed(resumed: Path) -> None:
    assert len(metrics(resumed, "one")) == 2


def test_a_run_that_exists_is_refused_unless_it_is_told_what_to_do(ratchet: Ratchet) -> None:
    for told in ([], ["--if-exists", "raise"]):
        said = ratchet("train", "faulty", "--run", "one", *told)
        assert said.code == 2
        assert "exists; continue it with --if-exists resume, start it afresh with" in said.stderr


def test_told_to_resume_it_refuses_another_recipe(ratchet: Ratchet) -> None:
    train = ("train", "faulty", "--run", "one", "--if-exists", "resume", "--set", "seed=5")
    said = ratchet(*train)
    assert said.code == 2
    assert "seed: 0 → 5" in said.stderr


def test_told_to_delete_it_starts_afresh(ratchet: Ratchet, resumed: Path) -> None:
    assert ratchet("fork", "one", "--at", "1", "--run", "kept").code == 0
    assert len(metrics(resumed, "kept")) == 2
    train = ("train", "faulty", "--run", "kept", "--steps", "1", "--if-exists", "delete")
    assert ratchet(*train).code == 0
    assert len(metrics(resumed, "kept")) == 1
    assert "parent" not in json.loads((resumed / "runs/kept/manifest.json").read_text())
    assert not list((resumed / "runs").glob(".*"))


def test_a_replay_reports_its_drift_and_is_resumed_as_a_replay(ratchet: Ratchet) -> None:
    said = ratchet("replay", "one", "--run", "centred", "--set", "algorithm.advantage=centred")
    assert said.code == 0, said.stderr
    assert "\nKL      " in said.stdout
    assert "from the weights that sampled" in ratchet("resume", "centred").stdout


@pytest.mark.parametrize("command", [["resume"], ["fork", "--at", "1"], ["replay"]])
def test_a_run_that_is_not_there_is_said_to_be_missing(
    ratchet: Ratchet, command: list[str]
) -> None:
    said = ratchet(*command, "none")
    assert said.code == 2
    assert "there is no run at" in said.stderr
