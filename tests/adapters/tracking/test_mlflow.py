"""MLflow: a run's parameters, metrics and checkpoints, once, however often the run is opened."""

from functools import partial
from pathlib import Path

import pytest

from adapters.tracking.tracker import TrackedRun
from tasks.settings.run import Tracking
from tasks.tracking.run_tracking import RunTracking, tracker_openers
from tests.support.runs.tracked_run import WRITTEN, GrowingRun

mlflow = pytest.importorskip("mlflow")


def test_mlflow_has_each_step_once_in_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run, config = GrowingRun(tmp_path / "fox"), {"rollouts.groups": 1, "agent": "x" * 7000}
    tracked = TrackedRun("fox", "0a1b2c", config, tmp_path / "fox" / "tracking", tmp_path)
    [opener] = tracker_openers(Tracking(experiment="demo")).values()
    for step in range(2):  # each time by another client, as after a crash
        run.evaluate(step)
        run.step(step)
        if step == 1:
            run.evaluate(2)
        with RunTracking(run.folder, {"MLflow": partial(opener, tracked)}, 2, 0) as tracking:
            tracking.follow()
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    home = client.get_experiment_by_name("demo").experiment_id
    [found] = client.search_runs([home])
    assert found.info.run_name == "fox"
    assert found.info.status == "FINISHED"
    assert found.data.params == {"rollouts.groups": "1", "agent": "x" * 6000}
    assert found.data.tags["checkpoint.2"] == "tinker://run/weights/2"
    rewards = client.get_metric_history(found.info.run_id, "reward/mean")
    of_steps = [(one.step, one.value, one.timestamp // 1000) for one in rewards]
    assert of_steps == [(0, 0.0, WRITTEN), (1, 1.0, WRITTEN + 1)]
    scores = client.get_metric_history(found.info.run_id, "test/reward/mean")
    assert [one.step for one in scores] == [0, 1, 2]
    assert "pass_1" in found.data.metrics
