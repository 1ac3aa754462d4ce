"""A live training client: what it saves is what it was when the save was asked for."""

import asyncio
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker import AdamParams, ModelInput, SamplingParams

from ratchet.adapters.diagnosis.bench import TOKENS, datum
from ratchet.adapters.tinker.engines import TinkerServer
from ratchet.adapters.tinker.live_policy import LivePolicy
from ratchet.adapters.tinker.service import Service, open_session
from tests.support.door.garbage import no_collector
from tests.support.processes import wait_until
from tests.support.servers.engine_server import TINY, serving

BASE = str(TINY)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with serving(TINY, tmp_path / "engine") as address:
        server = TinkerServer(address.url, address.key, Future(), None)
        with open_session(server, patience=60) as service:
            yield service


def test_a_save_does_not_hold_an_update_that_is_submitted_behind_it(service: Service) -> None:
    """The SDK's own thread, which numbers the save of a sampler, is late here."""
    create = service.client.create_lora_training_client
    client = service.create("a client", create, base_model=BASE, rank=8, seed=1)
    live = LivePolicy(service, client)
    service.client.holder.get_loop().call_soon_threadsafe(time.sleep, 0.5)
    saving = live.save("before", None, with_state=False)
    client.forward_backward([datum()], "cross_entropy")
    client.optim_step(AdamParams(learning_rate=0.1))
    saved = service.sampler(live.saved(0, saving)[0])
    untrained = service.base_sampler(BASE)
    last = [len(TOKENS) - 1]
    assert np.allclose(saved.score([TOKENS], last), untrained.score([TOKENS], last), atol=1e-4)


def test_the_future_of_an_answer_leaves_memory_without_the_garbage_collector(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler, prompt = service.base_sampler(BASE), ModelInput.from_ints([*TOKENS])
    sample, left = sampler.client.sample, list[weakref.ref[Any]]()

    def sample_and_look(*asked: Any) -> Any:
        future = sample(*asked)
        left.append(weakref.ref(future))
        return future

    monkeypatch.setattr(sampler.client, "sample", sample_and_look)
    with no_collector():
        asyncio.run(sampler.sample(prompt, 1, SamplingParams(max_tokens=2)))
        assert wait_until("the SDK's thread leaves it", lambda: left[0]() is None, seconds=10) < 11


LEFT_OPEN = """
import atexit, sys, time
from tinker.lib.internal_client_holder import InternalClientHolder
def drop():  # as the interpreter does when its threads have stopped
    loop = kept[0].get_loop()
    loop.call_soon_threadsafe(loop.stop)
    while loop.is_running():
        time.sleep(0.01)
    loop.close()
    kept.clear()
atexit.register(drop)  # first, and so it is called last
from ratchet.adapters.tinker import service
kept = [InternalClientHolder(base_url=sys.argv[1], api_key=sys.argv[2], _skip_session=True)]
"""


def test_a_client_that_is_left_open_ends_in_silence_with_its_process(tmp_path: Path) -> None:
    with serving(TINY, tmp_path / "engine") as address:
        command = [sys.executable, "-c", LEFT_OPEN, address.url, address.key]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
