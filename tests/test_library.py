"""`ratchet` as a library: what a notebook reads of a run needs no other import."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import pytest
from prefect import Flow

import ratchet
from ratchet.flows.opening.flow_runs import RunSummary
from tests.support.processes import ROOT
from tests.support.runs.small_recipe import small_recipe
from tests.support.servers.engine_server import Address

PAGE = (Path(__file__).parent.parent / "docs" / "sql.md").read_text(encoding="utf-8")
FEWER = ("rollouts.groups", "rollouts.group_size", "evaluation.examples")
RECIPE = small_recipe(
    steps=1,
    rollouts={"groups": 2, "group_size": 2, "max_tokens": 8},
    evaluation={"examples": 1, "greedy": False},
)


@pytest.fixture(scope="module")
def summary(root: Path, run_shown: None, tiny_chat: Address) -> RunSummary:
    """The summary of a training of one step."""
    return ratchet.train(RECIPE, run="read")


@pytest.fixture
def run(summary: RunSummary) -> ratchet.Run:
    """That run, as a notebook opens it."""
    return ratchet.Run(summary.run)


def test_a_run_has_its_recipe_and_its_metrics(run: ratchet.Run) -> None:
    assert run in ratchet.runs()
    assert run.recipe.model_dump() == RECIPE.model_dump()
    [metrics] = run.metrics()
    assert metrics["step"] == 0
    assert "reward/mean" in metrics


def test_a_run_has_its_rollouts_and_views_over_them(run: ratchet.Run) -> None:
    rollouts = run.rollouts(0)
    assert len(rollouts) == 4
    with run.views("rollouts") as connection:
        rows = connection.sql(
            "select rollout_id, reward from rollouts where split = 'train' order by rollout_id"
        ).fetchall()
    assert rows == [(rollout["rollout_id"], rollout["reward"]) for rollout in rollouts]
    assert len(run.rollouts(0, "test")) == 1
    assert run.rollouts(1) == []


def test_a_run_has_its_checkpoints_and_their_evaluations(run: ratchet.Run) -> None:
    assert [checkpoint.step for checkpoint in run.checkpoints()] == [0, 1]
    evaluations = run.evaluations()
    assert [*evaluations] == ["00000", "00001"]
    score = evaluations["00001"]["sampled"]
    assert isinstance(score, ratchet.Score)
    assert run.report().read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.usefixtures("summary")
def test_the_page_s_snippet_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [snippet] = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    fewer = ", ".join(f'"{key}=2"' for key in FEWER)
    script = tmp_path / "page.py"
    script.write_text(snippet.replace('"steps=4"', f'"steps=4", {fewer}'))
    runpy.run_path(str(script))
    printed = capsys.readouterr().out
    assert printed.startswith("held-out reward ")
    assert "'question': 'You are " in printed
    assert "avg(reward)" in printed


@pytest.mark.usefixtures("summary")
def test_the_recipe_of_a_run_is_read_by_a_process_that_imports_nothing_else() -> None:
    script = (
        "from ratchet.flows.recipe.loading import read_recipe\n"
        "from ratchet.tasks.storage.run_folder import folder_of\n"
        "print(read_recipe(folder_of('read')).flow)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout == "train\n"


@pytest.mark.usefixtures("root")
def test_a_run_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ratchet.UserError, match=r"there is no run at .*nobody; `ratchet runs`"):
        ratchet.Run("nobody")


def test_the_library_s_names_have_documentation() -> None:
    for name in ratchet.__all__:
        documented = getattr(ratchet, name)
        assert isinstance(documented, type | FunctionType | Flow)
        assert documented.__doc__, name
