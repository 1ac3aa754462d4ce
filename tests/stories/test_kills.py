"""The kill harness in its shortest form."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL

from benchmarks.interruptions import kill_report, killable_runs, kills, workloads

pytestmark = pytest.mark.story

WORKLOADS = ("hello", "guessing")
"""Two are as much as a test may take; `make kills` has all."""
SHORT = ("steps=4", "evaluation.every=0", "checkpoints.every=2")


@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("prefect_server")
def test_runs_killed_at_random_equal_uninterrupted_runs(tmp_path: Path) -> None:
    environment = killable_runs.environment(tmp_path / "home", PREFECT_API_URL.value())
    harness = kills.Harness(tmp_path, environment, seed=0, each=3)
    trials = [
        kills.Trial(name, (*workloads.WORKLOADS[name], *SHORT), kill_report.Width(batches=2, lag=1))
        for name in WORKLOADS
    ]
    with ThreadPoolExecutor() as threads:
        running = [threads.submit(kills.run_trial, harness, trial) for trial in trials]
    for trial in running:
        trial.result()

    lines = harness.lines()
    assert kill_report.list_violations(lines) == []
    ended = {line["run"] for line in lines if line["kind"] == "trial"}
    killed = {line["run"] for line in lines if line["kind"] == "kill"}
    assert ended == killed == {trial.run for trial in trials}
