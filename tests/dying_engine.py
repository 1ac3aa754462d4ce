"""An engine that is killed at a given place of a run."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from adapters.door.batches import OpenBatch
from adapters.tinker.live_policy import LivePolicy, SubmittedUpdate, UpdateResult
from tasks.rollouts import Play, RolloutServer


@contextmanager
def dying_in_batch(name: str) -> Iterator[None]:
    """Kill a run's engine as soon as the batch is to be played."""
    play = RolloutServer.play

    def die(server: RolloutServer, batch: OpenBatch, how: Play) -> None:
        if batch.name == name:
            _kill_engine(server.service)
        play(server, batch, how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RolloutServer, "play", die)
        yield


@contextmanager
def dying_in_update(step: int) -> Iterator[None]:
    """Kill a run's engine when it has made the gradient of a step, before anything is saved."""
    result = LivePolicy.result

    def die(live: LivePolicy, submitted: SubmittedUpdate | None) -> UpdateResult:
        if submitted is not None and submitted.step == step:
            submitted.outputs[-1].result()
            _kill_engine(live._service)
        return result(live, submitted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LivePolicy, "result", die)
        yield


def _kill_engine(service: Any) -> None:
    os.kill(service.server.process, signal.SIGKILL)
