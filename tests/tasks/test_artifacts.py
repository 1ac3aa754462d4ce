"""Pages in Prefect's UI are best effort: a server that is away costs one warning and no time."""

import socket
import time
from pathlib import Path

import pytest
from prefect.artifacts import Artifact
from prefect.client.schemas.objects import Artifact as SavedArtifact
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from ratchet.adapters.calls import POLICY
from ratchet.tasks.checkpoints import Checkpoint, Ledger
from ratchet.tasks.recording.step_log import record_metrics
from ratchet.tasks.storage.manifest import write_manifest
from ratchet.tasks.storage.run_folder import RunFolder
from ratchet.tasks.tracking.prefect_pages import (
    UI_NAME,
    PrefectPages,
    artifact_key,
    describe_evaluations,
    metric_rows,
)
from ratchet.tasks.tracking.run_tracking import RunTracking
from tests.support.runs.small_recipe import small_recipe
from tests.tasks.test_report_page import record_run
from tests.tasks.test_run_list import evaluate

pytestmark = pytest.mark.filterwarnings("ignore:Artifact creation outside of a flow")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    write_manifest(run, small_recipe(steps=3).model_dump(mode="json"), "f00d")
    for step in range(3):
        record_metrics(run.metrics, step, {"reward/mean": 0.5})
    return run


def shown(run: RunFolder, steps: int) -> RunTracking:
    """Return the tracking of a run of so many steps by pages alone, which follow it."""
    pages = PrefectPages(run)
    tracking = RunTracking(run, {UI_NAME: lambda: pages}, steps, 0)
    tracking.follow()
    return tracking


def show_all(run: RunFolder, address: str) -> float:
    """Show a run of three steps on a Prefect server; return the seconds that it took."""
    started = time.monotonic()
    with (
        temporary_settings({PREFECT_API_URL: address, PREFECT_CLIENT_MAX_RETRIES: 0}),
        shown(run, 3) as tracking,
    ):
        for step in range(3):
            record_metrics(run.metrics, step, {"reward/mean": 0.5})
            tracking.follow()
    return time.monotonic() - started


def test_a_server_that_is_away_costs_one_warning(
    run: RunFolder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ratchet.tasks.tracking.run_tracking.LAST_SECONDS", 120.0)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        show_all(run, f"http://127.0.0.1:{closed.getsockname()[1]}/api")
    (warning,) = [
        record.message for record in caplog.records if record.name.startswith("ratchet.tasks")
    ]
    assert warning.startswith("Prefect's UI does not have all of the run: ConnectError")
    assert "The training needs none of it" in warning


def test_a_server_that_is_silent_holds_no_step_up(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ratchet.tasks.tracking.run_tracking.LAST_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/api"
        assert show_all(run, address) < 40, "Prefect's client alone waits for 60 s"


def test_a_stopped_run_does_not_wait_for_a_silent_server(run: RunFolder) -> None:
    """It would be killed when the grace of its signal is over."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/api"
        with temporary_settings({PREFECT_API_URL: address, PREFECT_CLIENT_MAX_RETRIES: 0}):
            tracking = shown(run, 3)
            started = time.monotonic()
            tracking.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
        assert time.monotonic() - started < 40, "Prefect's client alone waits for 60 s"


@pytest.mark.usefixtures("run_shown")
def test_curves_metrics_evaluations_and_transcripts_come_while_a_run_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ratchet.tasks.tracking.prefect_pages.FIRST_SECONDS", 0.0)
    monkeypatch.setattr("ratchet.tasks.tracking.run_tracking.LAST_SECONDS", 120.0)
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path / "runs"))
    run = record_run(f"trains-{tmp_path.name}")
    with shown(run, 3) as tracking:
        tracking.follow()
    for what in ("progress", "curves", "metrics", "transcripts", "evaluations"):
        assert Artifact.get(artifact_key(run.name, what)) is not None, what


@pytest.mark.usefixtures("run_shown")
def test_a_run_that_ended_early_has_all_pages_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ratchet.tasks.tracking.run_tracking.LAST_SECONDS", 120.0)
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path / "runs"))
    run = record_run(f"early-{tmp_path.name}", steps=6)
    run.record_end(1, "after checkpoint 0: held_out/reward/mean 1 >= 1")
    with shown(run, 6) as tracking:
        tracking.follow()
    progress = Artifact.get(artifact_key(run.name, "progress"))
    assert isinstance(progress, SavedArtifact)
    assert progress.data == 100
    for what in ("curves", "metrics", "transcripts", "evaluations"):
        assert Artifact.get(artifact_key(run.name, what)) is not None, what


def test_the_table_of_metrics_has_the_eight_columns_that_one_reads(run: RunFolder) -> None:
    more = {"tokens/sampled": 900, "entropy": 0.41873, "kl_sample_train_v1": 2.0246e-08, "ess": 1.0}
    spent = {"seconds/sampling": 3.5, "seconds/training": 1.25, "seconds/rollout": 2.0}
    record_metrics(run.metrics, 3, {"reward/mean": 0.71094, "rollouts/failed": 2, **more, **spent})
    evaluate(run, 4, 1.0, 0.5)
    rows = metric_rows(run)
    assert rows[3] == {
        "step": 4,
        "reward": 0.7109,
        "held-out": 0.75,
        "entropy": 0.4187,
        "KL": 2.025e-08,
        "tokens": 900,
        "failed": 2,
        "seconds": 4.75,
    }
    assert [list(row) for row in rows] == [list(rows[3])] * 4
    record_metrics(run.metrics, 4, {"kl_reference_v1": 0.25, "kl_sample_train_v1": 1e-8})
    assert metric_rows(run)[4]["KL"] == 0.25


def test_evaluations_lead_with_the_reward_and_shorten_the_paths_of_weights(run: RunFolder) -> None:
    path = "tinker://0c9f7f3e-58a1-4d0f-9d9a-0d5a2c5d8f11:train:0/sampler_weights/00004-1-e0d234"
    Ledger(run.checkpoints(POLICY)).add(Checkpoint(4, sampler=path, state=None))
    evaluate(run, 4, 1.0, 0.5)
    scores, weights, whole = describe_evaluations(run).split("\n\n")
    names, _, row = scores.splitlines()
    assert names.startswith("| step | held-out reward | 95 % interval | examples | failed | played")
    assert row.startswith("| 4 | 0.75 | - | 2 | 0 | sampled | all")
    [shown] = [line for line in weights.splitlines() if "tinker://" in line]
    assert "…" in shown
    assert shown.index("00004-1-e0d234`") > 0
    assert max(map(len, weights.splitlines())) < 80
    assert path not in shown
    assert str(run.checkpoints(POLICY)) in whole
