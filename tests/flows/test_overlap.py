"""Steps that overlap: rollouts are sampled while earlier steps are trained."""

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from benchmarks.interruptions.compare_runs import differing_parts, read_contents
from ratchet.adapters.calls import POLICY
from ratchet.adapters.door.door import Door
from ratchet.adapters.player_protocol import PlaySettings
from ratchet.adapters.project.modules import load_agent_file
from ratchet.adapters.tinker.live_policy import LivePolicy, UpdateResult
from ratchet.adapters.tinker.service import ServiceRefused
from ratchet.flows.opening.rollouts import Spans
from ratchet.flows.opening.steps import steps_by_shard
from ratchet.flows.train import train
from ratchet.tasks.recording.step_log import read_metrics
from ratchet.tasks.rollouts import RolloutHost
from ratchet.tasks.storage.run_folder import RunFolder
from tests.support.door.played_batch import service_without_engine
from tests.support.runs.small_recipe import small_recipe
from tests.support.runs.whole_run import die_and_go_on, differences, fixture_of
from tests.support.servers.dying_engine import dying_in_batch, dying_in_update

STEPS, LAG = 4, 2
RECIPE = small_recipe(
    steps=STEPS,
    rollouts={"groups": 4, "group_size": 4, "max_tokens": 16, "lag": LAG},
    checkpoints={"every": 2},
    evaluation={"examples": 4, "every": 2},
)
whole = fixture_of(RECIPE)


@pytest.mark.parametrize(
    ("lag", "begins"),
    [
        (0, ["submit 3", "train 3", "submit 4", "train 4"]),
        (1, ["submit 3", "submit 4", "train 3", "submit 5", "train 4"]),
        (9, ["submit 3", "submit 4", "submit 5", "submit 6", "train 3", "train 4"]),
    ],
)
def test_a_step_is_submitted_as_soon_as_its_checkpoint_is_there(
    lag: int, begins: list[str]
) -> None:
    log: list[str] = []

    def submit(step: int, checkpoint: int, number: int) -> Sequence[Spans]:
        assert (checkpoint, number) == (max(step - lag, 0), 0)
        log.append(f"submit {step}")
        return []

    trained = []
    for step, _, _ in steps_by_shard(range(3, 7), lag, submit):
        log.append(f"train {step}")
        trained.append(step)
    assert trained == [3, 4, 5, 6]
    assert log[: len(begins)] == begins


def test_a_step_is_sampled_by_exactly_the_checkpoint_of_lag_updates_before(
    whole: RunFolder,
) -> None:
    versions = [
        set(pq.read_table(whole.datums("policy", step))["policy_version"].to_pylist())
        for step in range(STEPS)
    ]
    assert versions == [{"00000"}, {"00000"}, {"00000"}, {"00001"}]
    metrics = read_metrics(whole.metrics)
    assert [row["lag"] for row in metrics] == [0, 1, 2, 2]
    assert metrics[0]["ess"] == pytest.approx(1, abs=1e-6)
    assert all(0 < row["ess"] < 1 for row in metrics[1:])
    assert metrics[3]["ess"] == metrics[3]["ess/lag_2"]


def test_every_due_checkpoint_is_scored_beside_the_training(whole: RunFolder) -> None:
    scored = [path.name for path in sorted((whole.path / "evaluations").iterdir())]
    assert scored == ["00000.json", "00002.json", "00004.json"]


@pytest.mark.story
def test_a_run_in_more_batches_overlaps_to_the_same_weights(
    whole: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path))
    rollouts = RECIPE.rollouts.model_copy(update={"batches": 2})
    train(RECIPE.model_copy(update={"rollouts": rollouts}), run="batches")
    assert (
        differing_parts(read_contents(RunFolder(tmp_path / "batches")), read_contents(whole)) == []
    )


@pytest.mark.story
@pytest.mark.parametrize(
    "killed",
    [dying_in_batch("train-00003.0"), dying_in_update(1), dying_in_update(3)],
    ids=["batch", "update before another", "last update"],
)
def test_a_run_that_dies_while_steps_overlap_continues_as_if_it_had_not(
    killed: AbstractContextManager[None], whole: RunFolder, tmp_path: Path
) -> None:
    broken = die_and_go_on(RECIPE, killed, tmp_path)
    assert differences(broken, whole) == []
    updates = [json.loads(broken.update("policy", step).read_text()) for step in range(STEPS)]
    probed = [update[key] for update in updates if (key := "probe/max_difference") in update]
    assert sum("probe/optimizer_step" in update for update in updates) == 1
    assert max(probed, default=0) <= 1e-4


hello = load_agent_file("hello")
STARTED: list[str] = []


async def slow_after_the_first_step(example: dict[str, Any], **endpoint: str) -> float:
    """Play the four rollouts of the first step at once, and all others for an hour."""
    STARTED.append(endpoint["base_url"])
    reward = float(len(STARTED) % 2)
    if "/train-00000-" not in endpoint["base_url"]:
        await asyncio.sleep(3600)
    await hello.play(example, **endpoint)
    return reward


@pytest.mark.timeout(200)
@pytest.mark.usefixtures("prefect_server", "tiny_chat")
def test_an_error_of_a_step_ends_the_rollouts_of_later_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> UpdateResult:
        while len(STARTED) < 8:
            time.sleep(0.05)
        raise ServiceRefused("no")

    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path))
    monkeypatch.setattr(LivePolicy, "result", refuse)
    rollouts = {"groups": 2, "group_size": 2, "lag": 1, "timeout_seconds": 3600}
    recipe = RECIPE.model_copy(
        update={
            "agent": "tests.flows.test_overlap:slow_after_the_first_step",
            "rollouts": RECIPE.rollouts.model_copy(update=rollouts),
            "evaluation": RECIPE.evaluation.model_copy(update={"examples": 1}),
        }
    )
    with pytest.raises(ServiceRefused, match="no"):
        train(recipe, run="refused")


def test_a_batch_that_begins_after_the_others_were_cancelled_is_not_played(
    open_door: Door, tmp_path: Path
) -> None:
    played = []

    async def play(*given: str) -> None:
        played.append(given)

    settings = PlaySettings("hello", [POLICY], 4, 60)
    server = RolloutHost(RunFolder(tmp_path), open_door, service_without_engine(), settings)
    no_batch: Any = None
    server.cancel()
    with pytest.raises(asyncio.CancelledError):
        server.play(no_batch, play)
    assert played == []
