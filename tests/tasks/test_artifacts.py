"""Artifacts are best effort: a server that is away costs one warning and no time."""

import socket
import time
from pathlib import Path

import pytest
from prefect.artifacts import Artifact
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from tasks.metrics import record_metrics
from tasks.reports.artifacts import Artifacts, artifact_key
from tasks.storage.run_folder import RunFolder
from tests.tasks.test_report_page import record_run

pytestmark = pytest.mark.filterwarnings("ignore:Artifact creation outside of a flow")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    for step in range(3):
        record_metrics(run.metrics, step, {"reward/mean": 0.5})
    return run


def show_all(run: RunFolder, address: str) -> float:
    """Show a run of three steps on a Prefect server; return the seconds that it took."""
    started = time.monotonic()
    with (
        temporary_settings({PREFECT_API_URL: address, PREFECT_CLIENT_MAX_RETRIES: 0}),
        Artifacts(run, 3) as artifacts,
    ):
        for step in range(3):
            artifacts.show(step, {"reward/mean": 0.5})
    return time.monotonic() - started


def test_a_server_that_is_away_costs_one_warning(
    run: RunFolder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.reports.artifacts.LAST_SECONDS", 120.0)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        show_all(run, f"http://127.0.0.1:{closed.getsockname()[1]}/api")
    (warning,) = [record.message for record in caplog.records if record.name.startswith("tasks")]
    assert warning.startswith("Prefect's UI does not show all of run: ConnectError")
    assert warning.endswith("The training needs none of it")


def test_a_server_that_is_silent_holds_no_step_up(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.reports.artifacts.LAST_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/api"
        assert show_all(run, address) < 40, "Prefect's client alone waits for 60 s"


@pytest.mark.usefixtures("prefect_server")
def test_curves_metrics_evaluations_and_transcripts_come_while_a_run_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.reports.artifacts.FIRST_SECONDS", 0.0)
    monkeypatch.setattr("tasks.reports.artifacts.LAST_SECONDS", 120.0)
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path / "runs"))
    run = record_run(f"trains-{tmp_path.name}")
    with Artifacts(run, 3) as artifacts:
        artifacts.show(0, {"reward/mean": 0.5})
    for what in ("progress", "curves", "metrics", "transcripts", "evaluations"):
        assert Artifact.get(artifact_key(run, what)) is not None, what
