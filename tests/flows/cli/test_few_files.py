"""A machine that lets a process open few files: all rollouts are answered, or the run says why."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL

from ratchet.tasks.recording.step_log import read_metrics
from ratchet.tasks.storage.run_folder import RunFolder
from tests.support.processes import ROOT

LIMITED = 'ulimit -n "$0"; exec "$@"'
WORDS = "train hello --steps 1 --run few --set rollouts.groups=8"


def train(limit: int, runs: Path) -> "subprocess.CompletedProcess[str]":
    ratchet = [sys.executable, "-m", "ratchet.flows.cli.main", *WORDS.split()]
    variables = {"RATCHET_RUNS": str(runs), "PREFECT_API_URL": str(PREFECT_API_URL.value())}
    return subprocess.run(
        ["/bin/sh", "-c", LIMITED, str(limit), *ratchet],
        env={**os.environ, **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


@pytest.mark.story
@pytest.mark.usefixtures("prefect_server", "no_tinker")
def test_no_rollout_fails_where_few_files_may_be_open_and_the_run_says_so(tmp_path: Path) -> None:
    trained = train(128, tmp_path)
    assert trained.returncode == 0, trained.stderr
    [row] = read_metrics(RunFolder(tmp_path / "few").metrics)
    assert (row["rollouts/failed"], row["rollouts/ok"]) == (0, 64)
    assert "of 128 rollouts of a batch are played at a time" in trained.stderr


@pytest.mark.story
@pytest.mark.usefixtures("prefect_server", "no_tinker")
def test_a_run_for_which_too_few_files_may_be_open_says_so_before_it_begins(tmp_path: Path) -> None:
    refused = train(64, tmp_path)
    assert refused.returncode == 2
    assert "raise the limit of open files (`ulimit -n`" in refused.stderr.splitlines()[-1]
    assert not (tmp_path / "few").exists()
