"""A flow whose datums no rollout made is as durable as `train`: it is killed, and loses nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL

from benchmarks.interruptions.compare_runs import list_faults, read_contents
from ratchet.flows.recipe.loading import read_recipe
from ratchet.flows.recipe.recipe import Recipe
from ratchet.flows.recipe.run_recipe import FlowError
from ratchet.tasks.recording.step_log import read_metrics
from ratchet.tasks.reports.board.runs import runs_table
from ratchet.tasks.reports.verification import find_damage
from ratchet.tasks.storage.run_folder import RunFolder, folder_of
from tests.support.processes import ROOT
from tests.support.runs.given_datums import RECIPE, CountingRecipe, count


@pytest.fixture(scope="module")
def whole(root: Path, prefect_server: None, no_tinker: None) -> RunFolder:
    count(RECIPE, run="whole")
    return folder_of("whole")


def test_the_model_learns_to_count(whole: RunFolder) -> None:
    metrics = read_metrics(whole.metrics)
    assert [row["datums"] for row in metrics] == [2] * RECIPE.steps
    assert [row["tokens/trained"] for row in metrics] == [14] * RECIPE.steps
    assert not [name for row in metrics for name in row if name.startswith(("rollouts", "kl_"))]


@pytest.mark.story
@pytest.mark.parametrize("phase", ["begin", "add"])
def test_a_killed_run_ends_with_the_same_bits(whole: RunFolder, phase: str) -> None:
    """Whether or not the service has applied the update that nobody noted as saved."""
    name = f"killed-{phase}"
    command = [sys.executable, "-m", "tests.support.runs.given_datums", name, phase]
    environment = {**os.environ, "PREFECT_API_URL": str(PREFECT_API_URL.value())}
    killed = subprocess.run(command, cwd=ROOT, env=environment, check=False, timeout=250)
    assert killed.returncode == -9
    run = folder_of(name)
    assert len(read_metrics(run.metrics)) == 2

    count(RECIPE, run=name)
    assert list_faults(run, read_contents(whole)) == []


def test_the_recipe_of_a_run_is_read_by_its_flow(whole: RunFolder) -> None:
    assert read_recipe(whole) == RECIPE
    assert read_recipe(whole, CountingRecipe) == RECIPE
    with pytest.raises(FlowError, match="was made by the flow count, and this needs"):
        read_recipe(whole, Recipe)


def test_what_reads_runs_reads_one_without_rollouts(whole: RunFolder) -> None:
    assert [*find_damage(whole)] == []
    assert "whole" in runs_table(100)
