"""`ratchet watch` waits for a run that is being started; it refuses misspelt names and sweeps."""

from pathlib import Path
from threading import Timer

import pytest
from typer.testing import CliRunner, Result

from ratchet.adapters.errors import UserError
from ratchet.flows.cli.commands import app
from ratchet.tasks.storage.manifest import write_manifest
from ratchet.tasks.storage.plan_record import PlanRecord, write_plan
from ratchet.tasks.storage.run_folder import RunFolder
from tests.support.runs.finished import write_finished
from tests.support.runs.small_recipe import small_recipe


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path))


def watch(run: str) -> Result:
    return CliRunner().invoke(app, ["watch", run])


def test_a_run_whose_folder_is_not_there_yet_is_waited_for() -> None:
    write_finished("hello-1", small_recipe())
    starting = Timer(1, write_finished, ("hello-2", small_recipe()))
    starting.start()
    shown = watch("hello-2")
    starting.join()
    assert shown.exit_code == 0, shown.output
    assert shown.stderr == "waiting up to 30 s for the run hello-2 to begin\n"
    assert "hello-2: finished" in shown.stdout


def test_a_name_near_another_is_answered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ratchet.flows.cli.runs.BEGIN_SECONDS", float("inf"))
    write_finished("hello-1", small_recipe())
    shown = watch("helo-1")
    assert isinstance(shown.exception, UserError)
    assert str(shown.exception).endswith("; did you mean 'hello-1'?")


def test_a_run_that_does_not_come_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ratchet.flows.cli.runs.BEGIN_SECONDS", 0)
    shown = watch("otter")
    assert isinstance(shown.exception, UserError)
    assert str(shown.exception).startswith("there is no run at ")


def test_a_sweep_names_its_runs_that_have_begun(tmp_path: Path) -> None:
    write_plan(RunFolder(tmp_path / "sweep"), PlanRecord({}, ["sweep-a", "sweep-b"], "reward"))
    write_manifest(RunFolder(tmp_path / "sweep-a"), {}, "f00d")
    refused = watch("sweep").exception
    assert isinstance(refused, UserError)
    assert str(refused).endswith("begun are sweep-a")
