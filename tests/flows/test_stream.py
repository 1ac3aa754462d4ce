"""Streamed steps: a batch's forward-backward is submitted before the other batches have ended."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from benchmarks.interruptions.compare_runs import state_folder
from ratchet.adapters.calls import POLICY
from ratchet.adapters.door.batches import OpenBatch
from ratchet.adapters.tinker.live_policy import LivePolicy, LoraSpec, Pass
from ratchet.flows.train import train
from ratchet.tasks.checkpoints import Ledger
from ratchet.tasks.recovery.recorded_steps import RecordedSteps, TrainedPolicy
from ratchet.tasks.rollouts import Play, RolloutHost
from ratchet.tasks.storage.run_folder import RunFolder
from ratchet.tasks.storage.tables import read_table
from tests.support.credited import recorded_steps
from tests.support.processes import wait_until
from tests.support.runs.small_recipe import small_recipe
from tests.support.runs.whole_run import die_and_go_on, differences, train_whole
from tests.support.servers.dying_engine import dying_in_batch, dying_in_update

STEPS, BATCHES = 3, 2
ROLLOUTS = {"groups": 4, "group_size": 4, "max_tokens": 16, "batches": BATCHES}
STREAMED = small_recipe(
    steps=STEPS, rollouts={**ROLLOUTS, "stream": True}, checkpoints={"every": 2}
)


@pytest.fixture(scope="module")
def whole(
    tmp_path_factory: pytest.TempPathFactory, prefect_server: None, no_tinker: None
) -> Iterator[RunFolder]:
    """A streamed run in which the last batch of each step waits for the first one's pass."""
    passes = 0
    accumulate, play = LivePolicy.accumulate, RolloutHost.play

    def count(live: LivePolicy, step: int, asked: Pass) -> None:
        nonlocal passes
        accumulate(live, step, asked)
        passes += 1

    def wait_for_the_pass(server: RolloutHost, batch: OpenBatch, how: Play) -> None:
        name, _, number = batch.name.partition(".")
        if name.startswith("train-") and int(number) == BATCHES - 1:
            before = int(name[-5:]) * BATCHES
            wait_until("the first batch's pass", lambda: passes > before)
        play(server, batch, how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LivePolicy, "accumulate", count)
        patch.setattr(RolloutHost, "play", wait_for_the_pass)
        with train_whole(STREAMED, tmp_path_factory.mktemp("runs")) as run:
            patch.undo()
            yield run


@pytest.mark.story
def test_the_passes_of_a_step_are_its_batches(whole: RunFolder) -> None:
    passes = [recorded(whole).restored(step).request.passes for step in range(STEPS)]
    assert [*map(len, passes)] == [BATCHES] * STEPS
    rollouts = read_table(whole.datums(POLICY, 1), ["rollout_id"])["rollout_id"].to_pylist()
    of_batch = [
        {*read_table(path, ["rollout_id"])["rollout_id"].to_pylist()}
        for path in whole.sealed("train-00001")
    ]
    counts = [sum(rollout in batch for rollout in rollouts) for batch in of_batch]
    assert [len(asked.datums) for asked in passes[1]] == counts


@pytest.mark.story
def test_streaming_changes_the_weights_by_no_more_than_rounding(
    whole: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path))
    train(small_recipe(steps=1, rollouts=ROLLOUTS), run="at-once")
    train(small_recipe(steps=1, rollouts={**ROLLOUTS, "stream": True}), run="streamed")
    at_once, streamed = (lora(RunFolder(tmp_path / name)) for name in ("at-once", "streamed"))
    assert at_once.keys() == streamed.keys()
    for name, weights in at_once.items():
        assert np.abs(streamed[name] - weights).max() <= 1e-5, name


@pytest.mark.story
@pytest.mark.parametrize(
    "killed",
    [dying_in_batch("train-00002.1"), dying_in_update(1), dying_in_update(2)],
    ids=["batch", "update with a state before", "update without"],
)
def test_a_streamed_run_that_dies_continues_as_if_it_had_not(
    killed: AbstractContextManager[None], whole: RunFolder, tmp_path: Path
) -> None:
    assert differences(die_and_go_on(STREAMED, killed, tmp_path), whole) == []


def recorded(run: RunFolder) -> RecordedSteps:
    lora = LoraSpec("base", 8, 0, train_attn=True, train_mlp=True, train_unembed=True)
    policy = TrainedPolicy(POLICY, (POLICY,), lora)
    return recorded_steps(run, policy, STREAMED.credit(), STREAMED.update_method())


def lora(run: RunFolder) -> dict[str, np.ndarray]:
    """Return the LoRA after the first step."""
    state = Ledger(run.checkpoints(POLICY)).at(1).state
    assert state is not None
    folder = state_folder(run, state)
    return load_file(folder / "adapter_model.safetensors")
