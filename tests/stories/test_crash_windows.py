"""The walk over the crash windows of a run, in its shortest form; `make windows` is the whole."""

from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL

from benchmarks.interruptions import crash_windows, killable_runs

pytestmark = pytest.mark.story

PARTS = 400
"""Of so many shares of the windows, one is walked."""


@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("prefect_server")
def test_a_run_that_crashes_at_its_writes_equals_one_that_does_not(tmp_path: Path) -> None:
    environment = killable_runs.environment(tmp_path / "home", PREFECT_API_URL.value())
    reference = crash_windows.make_reference(tmp_path, environment)
    walk = crash_windows.Walk(tmp_path, environment, 0, PARTS)
    assert crash_windows.walk_windows(walk, reference, float("inf")) == []
    assert len(walk.windows()) >= 2
