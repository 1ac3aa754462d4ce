"""A run that has all that it is to have: `resume` says what it has come to, and opens nothing."""

import re
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from ratchet.flows.cli import training
from ratchet.flows.cli.commands import app
from ratchet.flows.opening.checks import is_complete
from ratchet.tasks.storage.run_folder import RunFolder
from tests.support.runs.small_recipe import small_recipe
from tests.support.runs.whole_run import fixture_of

RECIPE = small_recipe(steps=2)
whole = fixture_of(RECIPE)


@pytest.fixture
def run(whole: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A copy of a run that is complete."""
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path))
    return RunFolder(copytree(whole.path, tmp_path / "run"))


def call(*words: str) -> Result:
    return CliRunner().invoke(app, words, catch_exceptions=False)


def test_a_complete_run_is_resumed_without_an_engine_or_a_server(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something was opened")

    for name in ("check_start", "start_server"):
        monkeypatch.setattr(training, name, refuse)
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    said = call("resume", "run")
    assert said.exit_code == 0
    assert re.match(r"held-out reward [\d.]+ → [\d.]+ in 2 steps\n", said.stdout)
    assert re.search(r"^time    \d+ s: nothing was left to do$", said.stdout, re.M)
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before


@pytest.mark.parametrize(
    "lost", [lambda run: run.evaluation("00000"), lambda run: run.metrics], ids=["scores", "steps"]
)
def test_a_run_that_lacks_something_is_not_complete(
    run: RunFolder, lost: Callable[[RunFolder], Path]
) -> None:
    assert is_complete(run, RECIPE)
    lost(run).unlink()
    assert not is_complete(run, RECIPE)
