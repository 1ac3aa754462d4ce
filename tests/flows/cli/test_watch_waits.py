"""`ratchet watch` waits for a run that is being started, and not for a name that is misspelt."""

from pathlib import Path
from threading import Timer

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings
from typer.testing import CliRunner, Result

from adapters.errors import UserError
from flows.cli import inspect_runs
from flows.cli.commands import app
from tests.support.runs.finished import write_finished
from tests.support.runs.small_recipe import small_recipe


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path))


def watch(run: str) -> Result:
    with temporary_settings({PREFECT_API_URL: None}):
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
    monkeypatch.setattr(inspect_runs, "BEGIN_SECONDS", float("inf"))
    write_finished("hello-1", small_recipe())
    shown = watch("helo-1")
    assert isinstance(shown.exception, UserError)
    assert str(shown.exception).endswith("; did you mean 'hello-1'?")


def test_a_run_that_does_not_come_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect_runs, "BEGIN_SECONDS", 0)
    shown = watch("otter")
    assert isinstance(shown.exception, UserError)
    assert str(shown.exception).startswith("there is no run otter in ")
