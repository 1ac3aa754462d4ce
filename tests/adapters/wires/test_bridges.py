"""A bridge before a server of an older wire, which is a real engine behind what older ones say."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, cast

import httpx
import numpy as np
import psutil
import pytest
import tinker

from ratchet.adapters.errors import EngineDied, ServiceError
from ratchet.adapters.tinker.bridges import ask_wire, bridged
from ratchet.adapters.tinker.engines import TinkerServer
from ratchet.adapters.tinker.service import (
    Service,
    ServiceFailed,
    ServiceRefused,
    open_session,
    server_at,
)
from tests.support.servers.engine_server import Address
from tests.support.servers.older_server import OlderServer, older

CODECS = ("json", "protobuf")
GREEDY = tinker.SamplingParams(max_tokens=4, temperature=0, seed=1)
PROMPT = tinker.ModelInput.from_ints([5, 6, 7])
ADAM = tinker.AdamParams(learning_rate=0.01)


@pytest.fixture(scope="module", params=CODECS)
def old(address: Address, request: pytest.FixtureRequest) -> Iterator[OlderServer]:
    with older(address.url, datums=request.param) as server:
        yield server


@contextmanager
def session_with(url: str, key: str) -> Iterator[Service]:
    with server_at(url, key) as server, open_session(server, 60.0) as service:
        yield service


@pytest.fixture(scope="module")
def service(old: OlderServer, address: Address) -> Iterator[Service]:
    with session_with(old.url, address.key) as service:
        yield service


def created(service: Service, address: Address, seed: int = 0) -> tinker.TrainingClient:
    create = service.client.create_lora_training_client
    return service.create("a client", create, address.base_model, rank=4, seed=seed)


def datum(*targets: int) -> tinker.Datum:
    inputs = {
        "target_tokens": tinker.TensorData.from_numpy(np.array(targets)),
        "weights": tinker.TensorData.from_numpy(np.ones(len(targets), np.float32)),
    }
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints([*range(1, len(targets) + 1)]),
        loss_fn_inputs=cast(Any, inputs),
    )


def trained(client: tinker.TrainingClient, steps: int) -> list[np.ndarray]:
    """Train a few steps; return the log-probabilities of each."""
    scores = []
    for _ in range(steps):
        output = client.forward_backward([datum(9, 8, 7), datum(4)], "cross_entropy")
        client.optim_step(ADAM).result()
        scores += [one["logprobs"].to_numpy() for one in output.result().loss_fn_outputs]
    return scores


def weights_of(client: tinker.TrainingClient, service: Service, name: str) -> list[float]:
    """Save a client's weights, and return how they score a text."""
    path = client.save_weights_for_sampler(name).result().path
    assert path.count("/") == 4  # tinker://MODEL/sampler_weights/NAME
    [scores] = service.sampler(path).score([[5, 6, 7, 8]], [3])
    return scores.tolist()


def test_a_server_is_asked_which_wire_it_speaks(address: Address) -> None:
    assert ask_wire(address.url, address.key) is None
    for codec in CODECS:
        with older(address.url, datums=codec) as server:
            assert ask_wire(server.url, address.key) == codec


def test_a_server_of_the_sdks_wire_is_asked_directly(address: Address) -> None:
    server = TinkerServer(address.url, address.key, Future(), None)
    with bridged(server) as spoken:
        assert spoken is server


def test_a_server_that_reads_no_datums_is_refused_by_name(address: Address) -> None:
    with (
        older(address.url, broken="forward_backward") as server,
        pytest.raises(ServiceError, match=r"neither in protobuf \(500\) nor in JSON \(500"),
    ):
        ask_wire(server.url, address.key)


def test_a_server_that_cannot_be_asked_now_is_a_passing_fault(address: Address) -> None:
    with pytest.raises(ServiceFailed, match="which wire"), server_at("http://127.0.0.1:9", "tml-x"):
        pass


def test_training_by_an_older_wire_gives_the_numbers_of_the_engine(
    service: Service, address: Address
) -> None:
    with session_with(address.url, address.key) as direct:
        results = []
        for asked in (direct, service):
            client = created(asked, address)
            scores = trained(client, 3)
            forward = client.forward([datum(3, 2)], "cross_entropy").result()
            results.append((scores, forward.loss_fn_outputs, weights_of(client, asked, "w")))
    (ours, our_forward, our_weights), (theirs, their_forward, their_weights) = results
    assert all(map(np.array_equal, ours, theirs))
    assert our_forward[0]["logprobs"].to_numpy().tolist() == (
        their_forward[0]["logprobs"].to_numpy().tolist()
    )
    assert our_weights == their_weights


def test_a_client_created_by_loading_goes_on_where_the_saved_one_was(
    service: Service, address: Address
) -> None:
    client = created(service, address, seed=3)
    trained(client, 2)
    path = client.save_state("here").result().path
    after = trained(client, 2)
    create = service.client.create_training_client_from_state_with_optimizer
    loaded = service.create("a loaded client", create, path)
    assert all(map(np.array_equal, trained(loaded, 2), after))
    again = loaded.save_state("there").result().path
    assert again != path
    assert service.describe_weights(again).lora_rank == 4


def test_samples_carry_ids_and_the_log_probabilities_of_the_engine(
    service: Service, address: Address
) -> None:
    answers = []
    with session_with(address.url, address.key) as direct:
        for asked in (direct, service):
            client = asked.base_sampler(address.base_model).client
            answers.append(
                client.sample(PROMPT, 2, GREEDY, include_prompt_logprobs=True).result(60)
            )
    ours, theirs = answers
    assert [one.tokens for one in theirs.sequences] == [one.tokens for one in ours.sequences]
    assert [one.logprobs for one in theirs.sequences] == [one.logprobs for one in ours.sequences]
    assert theirs.prompt_logprobs == ours.prompt_logprobs
    assert theirs.prompt_logprobs is not None
    assert len(theirs.prompt_logprobs) == 3
    assert len({one.sequence_id for one in theirs.sequences}) == 2


def test_a_loss_of_ones_own_runs_without_the_metric_that_the_sdk_expects(
    service: Service, address: Address
) -> None:
    client = created(service, address)

    def loss(_: Any, logprobs: Any) -> Any:
        return -sum(one.sum() for one in logprobs), {"mine": 1.0}

    result = client.forward_backward_custom([datum(9, 8)], loss).result()
    assert result.metrics["mine"] == 1.0


def test_what_an_older_wire_has_no_field_of_is_refused_by_name(
    service: Service, address: Address
) -> None:
    client = created(service, address)
    saved = client.save_weights_and_get_sampling_client(kind="inflight")
    with pytest.raises(ServiceRefused, match="asks for kind 'inflight'"):
        service.result(saved, "an in-flight sampler")
    sampler = service.base_sampler(address.base_model)
    with pytest.raises(ServiceRefused, match="asks for target_prompt_logprobs"):
        sampler.score_chosen([[1, 2]], [np.array([[2]])])
    with pytest.raises(ServiceRefused, match="has no call /api/v1/save_weights_external"):
        service.result(client.save_weights_external("e"), "an export")


def test_a_request_that_fails_is_a_refusal_and_not_waited_for(
    service: Service, address: Address
) -> None:
    create = service.client.create_training_client_from_state
    with pytest.raises(ServiceRefused, match=r"load_weights|weights_info"):
        service.create("a loaded client", create, f"tinker://{'s' * 8}:train:9/weights/none")
    client = created(service, address)
    bad = tinker.Datum(model_input=PROMPT, loss_fn_inputs={})
    begun = time.monotonic()
    with pytest.raises(ServiceRefused, match="target_tokens"):
        service.result(client.forward_backward([bad], "cross_entropy"), "a loss")
    assert time.monotonic() - begun < 120  # the SDK repeats a failure for 300 s


def test_a_call_at_which_the_server_always_fails_is_refused_soon(
    old: OlderServer, service: Service, address: Address
) -> None:
    client = created(service, address)
    old.broken = "optim_step"
    begun = time.monotonic()
    try:
        with pytest.raises(ServiceRefused, match="failed 3 times"):
            service.result(client.optim_step(ADAM), "a step")
    finally:
        old.broken = ""
    assert time.monotonic() - begun < 120  # the SDK repeats a failure for 300 s


def test_the_end_of_a_session_gives_the_servers_slots_back(address: Address) -> None:
    with older(address.url, slots=2) as server:
        for _ in range(2):
            with session_with(server.url, address.key) as service:
                created(service, address)
                created(service, address)
                with pytest.raises(ServiceRefused, match=r"adapters \(2\) reached"):
                    created(service, address)
            assert server.live == set()


KILLED = """
import os, signal, sys
from ratchet.adapters.tinker.service import open_session, server_at
with server_at(sys.argv[1], sys.argv[2]) as server, open_session(server, 60) as service:
    create = service.client.create_lora_training_client
    service.create("a client", create, sys.argv[3], rank=4)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_that_is_killed_has_its_slots_given_back(address: Address) -> None:
    with older(address.url) as server:
        command = [sys.executable, "-c", KILLED, server.url, address.key, address.base_model]
        done = subprocess.run(command, check=False)
        assert done.returncode == -signal.SIGKILL
        assert server.seen["create_model"] == 1
        until = time.monotonic() + 60
        while server.live and time.monotonic() < until:
            time.sleep(0.1)
        assert server.live == set()


def bridges() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children()
        if "ratchet.adapters.wires.program" in child.cmdline()
    ]


def test_a_bridge_that_dies_ends_what_waits_for_it(old: OlderServer, address: Address) -> None:
    before = {*bridges()}
    with server_at(old.url, address.key) as server:
        [ours] = {*bridges()} - before
        ours.send_signal(signal.SIGKILL)
        with pytest.raises(EngineDied, match=r"the bridge .* was killed \(signal 9\)"):
            server.died.result(60)


def test_a_bridge_answers_the_key_of_its_run_alone(old: OlderServer, address: Address) -> None:
    with server_at(old.url, address.key) as bridge:
        asked = httpx.get(
            f"{bridge.url}/api/v1/get_server_capabilities", headers={"X-API-Key": "tml-other"}
        )
        assert asked.status_code == 401
        assert address.key not in asked.text
        large = httpx.post(
            f"{bridge.url}/api/v1/asample",
            headers={"X-API-Key": address.key},
            content=b"[" * (2**22 + 1),
        )
        assert (large.status_code, "more than" in large.text) == (400, True)
        for process in bridges():
            assert address.key not in " ".join(process.cmdline())
