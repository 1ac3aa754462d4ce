"""An engine that is killed at a given place of a run."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
from tenacity import stop_after_attempt

from ratchet.adapters.door.batches import OpenBatch
from ratchet.adapters.errors import EngineDied
from ratchet.adapters.tinker.live_policy import LivePolicy, SubmittedUpdate, UpdateResult
from ratchet.flows.train import train
from ratchet.tasks.rollouts import Play, RolloutHost


@contextmanager
def dying_in_batch(name: str) -> Iterator[None]:
    """Kill a run's engine as soon as the batch is to be played for the first time."""
    play, killed = RolloutHost.play, list[int]()

    def die(server: RolloutHost, batch: OpenBatch, how: Play) -> None:
        if batch.name == name and not killed:
            killed.append(_kill_engine(server.lifeline))
        play(server, batch, how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RolloutHost, "play", die)
        yield
    assert killed


@contextmanager
def dying_in_update(step: int) -> Iterator[None]:
    """Kill a run's engine once it has made the gradient of a step, before anything is saved."""
    result, killed = LivePolicy.result, list[int]()

    def die(live: LivePolicy, submitted: SubmittedUpdate) -> UpdateResult:
        if submitted is not None and submitted.step == step and not killed:
            submitted.outputs[-1].output.result()
            killed.append(_kill_engine(live._service))
        return result(live, submitted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LivePolicy, "result", die)
        yield
    assert killed


@contextmanager
def ending_the_run() -> Iterator[None]:
    """Have an engine that dies end the run, as the last of several does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cast(Any, train.fn).retry, "stop", stop_after_attempt(1))
        with pytest.raises(EngineDied, match="was killed"):
            yield


def _kill_engine(service: Any) -> int:
    os.kill(service.server.process, signal.SIGKILL)
    return service.server.process
