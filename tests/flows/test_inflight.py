"""In-flight weights: an update changes the weights that answer the rollouts that are under way."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Event
from typing import Any

import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from adapters.calls import POLICY
from adapters.project.modules import load_agent_file
from adapters.tinker.live_policy import LivePolicy, SubmittedUpdate, UpdateResult
from adapters.tinker.service import ServiceFailed
from benchmarks.interruptions.compare_runs import count_repetitions
from flows.train import train
from tasks.recording.step_log import read_metrics
from tasks.storage.run_folder import RunFolder
from tasks.updates import PolicyUpdater, Update
from tests.support.runs.small_recipe import small_recipe
from tests.support.servers.dying_engine import dying_in_batch, dying_in_update

hello = load_agent_file("hello")

STEPS = 3
UPDATED = Event()


async def play(example: dict[str, Any], *, base_url: str, **endpoint: str) -> float:
    """Play hello; the rollouts of the second step ask when the first update is made."""
    while "train-00001" in base_url and not UPDATED.is_set():
        await asyncio.sleep(0.02)
    reward = await hello.play(example, base_url=base_url, **endpoint)
    return reward + ("-01/attempt" in base_url)  # no group is uniform, so every step trains


def train_with(weights: str, run: str, monkeypatch: pytest.MonkeyPatch, runs: Path) -> RunFolder:
    """Train three steps with lag 1."""
    update = PolicyUpdater.update

    def tell(updater: PolicyUpdater, step: int, paths: Sequence[Path]) -> Update:
        updated = update(updater, step, paths)
        UPDATED.set()
        return updated

    UPDATED.clear()
    monkeypatch.setenv("RATCHET_RUNS", str(runs))
    monkeypatch.setattr(PolicyUpdater, "update", tell)
    rollouts = {"groups": 4, "group_size": 4, "max_tokens": 16, "lag": 1, "weights": weights}
    recipe = small_recipe(steps=STEPS, agent="tests.flows.test_inflight:play", rollouts=rollouts)
    try:
        summary = train(recipe, run=run)
    finally:
        monkeypatch.setattr(PolicyUpdater, "update", update)
    assert summary.reproducible == (weights == "snapshot")
    return RunFolder(runs / run)


@pytest.mark.story
@pytest.mark.usefixtures("prefect_server", "no_tinker")
def test_a_running_rollout_is_answered_by_the_weights_of_the_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        inflight = train_with("inflight", "inflight", monkeypatch, tmp_path)
    assert "updates change the weights of running rollouts: no other run repeats" in caplog.text
    snapshot = train_with("snapshot", "snapshot", monkeypatch, tmp_path)
    versions = [
        {*pq.read_table(run.datums(POLICY, 1))["policy_version"].to_pylist()}
        for run in (inflight, snapshot)
    ]
    assert versions == [{"00000+"}, {"00000"}]
    apart = [read_metrics(run.metrics)[1]["kl_sample_train_v2"] for run in (inflight, snapshot)]
    assert apart[0] < 1e-9 < apart[1]
    assert [row["lag"] for row in read_metrics(inflight.metrics)] == [0, 1, 1]


@pytest.mark.story
@pytest.mark.usefixtures("prefect_server", "no_tinker")
@pytest.mark.parametrize(
    "killed", [dying_in_batch("train-00002.0"), dying_in_update(1)], ids=["batch", "update"]
)
def test_a_run_with_inflight_weights_that_dies_continues_and_repeats_nothing(
    killed: AbstractContextManager[None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with killed:
        run = train_with("inflight", "broken", monkeypatch, tmp_path)
    assert len(read_metrics(run.metrics)) == STEPS
    counts = count_repetitions(run)
    assert (counts.finished_rerun, counts.sampled_twice, counts.applied_twice) == (0, 0, 0)


@pytest.mark.story
@pytest.mark.usefixtures("prefect_server", "no_tinker")
def test_running_rollouts_go_on_with_the_client_that_a_failed_update_is_retried_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, failed = LivePolicy.result, []

    def fail_once(live: LivePolicy, submitted: SubmittedUpdate) -> UpdateResult:
        if not failed and submitted is not None and submitted.step == 0:
            failed.append(live)
            raise ServiceFailed("the connection is gone")
        return result(live, submitted)

    monkeypatch.setattr(LivePolicy, "result", fail_once)
    run = train_with("inflight", "retried", monkeypatch, tmp_path)
    assert failed
    rows = read_metrics(run.metrics)
    assert [row["rollouts/failed"] for row in rows] == [0] * STEPS
    assert rows[1]["kl_sample_train_v2"] < 1e-9


def test_inflight_weights_without_a_lag_are_refused() -> None:
    with pytest.raises(ValidationError, match="weights inflight does nothing without lag"):
        small_recipe(rollouts={"weights": "inflight"})
