"""The kill harness at its shortest: runs that are killed end as if they had not been."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL

from benchmarks import kills, victims

TRIED = ("hello", "guessing")
"""Two are as much as a test may take; `make kills` has all."""
SHORT = ("steps=4", "evaluation.every=0", "checkpoints.every=2")


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("prefect_server")
def test_runs_that_are_killed_at_random_end_as_if_they_had_not_been(tmp_path: Path) -> None:
    environment = victims.environment(tmp_path / "home", PREFECT_API_URL.value())
    harness = kills.Harness(tmp_path, environment, seed=0, each=3, spread=0.5)
    with ThreadPoolExecutor() as beside:
        tries = [
            beside.submit(kills.tried, harness, name, (*kills.WORKLOADS[name], *SHORT), 0)
            for name in TRIED
        ]
    for ended in tries:
        ended.result()

    lines = harness.told()
    assert kills.failures(lines) == []
    assert sum(line["kind"] == "kill" for line in lines) >= 5
