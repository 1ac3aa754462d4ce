"""Weights that are lost are made anew from what was recorded, and proved before they are used."""

import json
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
import tinker
from tinker import AdamParams

from adapters.tinker.faults import ServiceFailed
from adapters.tinker.live_policy import Trainee
from adapters.tinker.service import Service
from tasks.checkpoints import Checkpoint, CheckpointError, Ledger
from tasks.datums import SCHEMA
from tasks.recovery import ProbeError
from tasks.storage.tables import write
from tasks.updates import Learner, Lora, Method
from tests.engine_server import Address, connected

ADAM = AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8)
METHOD = Method("importance_sampling", {}, ADAM)
STEPS = 4
PROMPT, ANSWER = [1, 2, 3], 5

Learn = Callable[..., Learner]


@pytest.fixture(scope="module")
def connection(address: Address, service: tinker.ServiceClient) -> Iterator[Service]:
    rest = tinker.RestClient(base_url=address.url, api_key=address.key)
    with ThreadPoolExecutor() as calls:
        yield Service(service, rest, Future(), calls, None, patience=60)


def lora(base_model: str) -> Lora:
    return Lora(base_model, 4, seed=7, train_attn=True, train_mlp=True, train_unembed=True)


@pytest.fixture
def learn(connection: Service, address: Address, tmp_path: Path) -> Learn:
    """A learner over the run in tmp_path, as a process that has just started has it."""

    def learner(**changes: Any) -> Learner:
        made = Learner(
            connection,
            Ledger(tmp_path / "checkpoints.jsonl"),
            lambda step: tmp_path / "datums" / f"{step:05d}.parquet",
            lora(address.base_model),
            lambda _: METHOD,
            ttl_seconds=None,
            probe_tolerance=1e-4,
        )
        return replace(made, **changes)

    return learner


def sampled_datums(learner: Learner, checkpoint: Checkpoint, path: Path) -> Path:
    """What the checkpoint samples, with advantages of 1 and -1; no datum in step 1."""
    rows = []
    for number in range(0 if checkpoint.step == 1 else 2):
        params = tinker.SamplingParams(max_tokens=ANSWER, seed=number, stop=[])
        client = learner.service.client.create_sampling_client(model_path=checkpoint.sampler)
        asked = client.result().sample(tinker.ModelInput.from_ints(PROMPT), 1, params)
        sequence = asked.result().sequences[0]
        assert sequence.logprobs is not None
        tokens, unknown = [*PROMPT, *sequence.tokens], [0.0] * (len(PROMPT) - 1)
        mask = [0] * (len(PROMPT) - 1) + [1] * ANSWER
        sign = 1.0 - 2 * number
        lists = {
            "tokens": tokens[:-1],
            "targets": tokens[1:],
            "logprobs": [*unknown, *sequence.logprobs],
            "advantages": [sign * one for one in mask],
            "mask": mask,
        }
        named = {"rollout_id": f"r{number}", "group_id": "g", "role": "policy", "first_call": 0}
        rows.append({**named, "policy_version": "", "reward": 0.0, "advantage": sign, **lists})
    return write(pa.Table.from_pylist(rows, schema=SCHEMA), path)


def advance(learner: Learner, first: int, last: int) -> list[dict[str, float]]:
    """Steps `first` to `last`; returns the proof of each. Every second state is saved."""
    learner.initial()
    proofs = []
    for step in range(first, last + 1):
        checkpoint, path = learner.ledger.at(step), learner.datums(step)
        if not path.exists():
            sampled_datums(learner, checkpoint, path)
        proofs.append(learner.update(checkpoint, path, with_state=(step + 1) % 2 == 0).proof)
    return proofs


def weights(learner: Learner, address: Address) -> list[bytes]:
    """The last state's tensors and optimizer, byte for byte."""
    state = learner.ledger.states(STEPS)[0].state
    assert state is not None
    name = state.removeprefix("tinker://")
    files = sorted(address.state.rglob(f"{name}.*/*.safetensors"))
    assert len(files) == 2
    return [file.read_bytes() for file in files]


@pytest.fixture
def undisturbed(learn: Learn, address: Address, tmp_path: Path) -> list[bytes]:
    """The weights of a run of four steps, whose ledger is then cut after the third."""
    learner = learn()
    assert advance(learner, 0, STEPS - 1) == [{}] * STEPS
    made = weights(learner, address)
    ledger = tmp_path / "checkpoints.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join(line for line in lines if json.loads(line)["step"] < STEPS))
    return made


def test_a_new_process_replays_what_no_state_holds_and_proves_it(
    learn: Learn, address: Address, undisturbed: list[bytes]
) -> None:
    learner = learn()
    (proof,) = advance(learner, 3, 3)
    assert weights(learner, address) == undisturbed
    assert proof["probe/max_difference"] <= 1e-5
    # Steps 0 to 3 without step 1, which had no datum: checkpoint 2 has 1, its replay makes 2.
    assert proof["probe/optimizer_step"] == 2


@pytest.mark.parametrize("gone", [[2], [0, 2]], ids=["the newest", "every one"])
def test_a_state_that_is_gone_is_replaced_by_an_older_one_and_more_replay(
    gone: list[int],
    learn: Learn,
    rest: tinker.RestClient,
    address: Address,
    undisturbed: list[bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    learner = learn()
    for step in gone:
        state = learner.ledger.at(step).state
        assert state is not None
        rest.delete_checkpoint_from_tinker_path(state).result()
    with caplog.at_level(logging.WARNING, logger="tasks"):
        (proof,) = advance(learner, 3, 3)
    assert weights(learner, address) == undisturbed
    assert proof["probe/optimizer_step"] == 1
    assert "An older state is taken, and more is replayed" in caplog.text
    assert ("no saved state is left" in caplog.text) == (gone == [0, 2])


def test_sampler_weights_that_are_gone_are_made_anew(
    learn: Learn,
    rest: tinker.RestClient,
    address: Address,
    undisturbed: list[bytes],
    tmp_path: Path,
) -> None:
    learner = learn()
    rest.delete_checkpoint_from_tinker_path(learner.ledger.at(3).sampler).result()
    learner.sampler(learner.ledger.at(3))
    again = sampled_datums(learner, learner.ledger.at(3), tmp_path / "again.parquet")
    assert again.read_bytes() == learner.datums(3).read_bytes()

    (proof,) = advance(learner, 3, 3)  # the client that saved them is live, but not yet proved
    assert set(proof) == {"probe/max_difference", "probe/optimizer_step"}
    assert weights(learner, address) == undisturbed


def test_a_seed_that_makes_other_weights_stops_the_run_with_the_numbers(
    learn: Learn, rest: tinker.RestClient, address: Address, undisturbed: list[bytes]
) -> None:
    other = learn(lora=replace(lora(address.base_model), seed=8, rank=2))
    for step in (0, 2):
        state = other.ledger.at(step).state
        assert state is not None
        rest.delete_checkpoint_from_tinker_path(state).result()
    with pytest.raises(ProbeError, match=r"untrained LoRA of seed 8 .* off by up to .* is 0\.0001"):
        advance(other, 3, 3)


def test_weights_that_are_not_those_that_sampled_stop_the_run_before_anything_is_applied(
    learn: Learn, undisturbed: list[bytes]
) -> None:
    learner = learn()
    wrong = learner.ledger.at(0)
    learner.ledger.add(Checkpoint(3, learner.ledger.at(3).sampler, wrong.state))
    with pytest.raises(ProbeError, match=r"not the one that sampled step 3.*Nothing was applied"):
        advance(learner, 3, 3)
    assert learner.ledger.in_doubt() is None
    assert learner.ledger.last_step() == 3


def test_a_tolerance_of_none_only_reports(learn: Learn, undisturbed: list[bytes]) -> None:
    learner = learn(probe_tolerance=None)
    wrong = learner.ledger.at(0)
    learner.ledger.add(Checkpoint(3, learner.ledger.at(3).sampler, wrong.state))
    with pytest.raises(ProbeError, match=r"first step is number 1, but .* make it number 3"):
        advance(learner, 3, 3)
    assert learner.ledger.last_step() == 3


def test_a_service_that_does_not_count_its_steps_is_said_to_be_unknown(
    learn: Learn,
    undisturbed: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    applied = Trainee.applied
    monkeypatch.setattr(Trainee, "applied", lambda *of: replace(applied(*of), optimizer_step=None))
    with caplog.at_level(logging.WARNING, logger="tasks"):
        (proof,) = advance(learn(), 3, 3)
    assert set(proof) == {"probe/max_difference"}
    assert "kept its moments is unknown" in caplog.text


def test_an_update_in_doubt_is_made_again_on_rebuilt_weights(
    learn: Learn,
    address: Address,
    undisturbed: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learner = learn()
    with monkeypatch.context() as patch:
        patch.setattr(Trainee, "saved", _fail)
        with pytest.raises(ServiceFailed):
            advance(learner, 3, 3)
    assert learner.ledger.in_doubt() == 4

    advance(learner, 3, 3)
    assert learner.ledger.in_doubt() is None
    assert weights(learner, address) == undisturbed


def test_datums_that_are_needed_and_gone_are_named(learn: Learn, undisturbed: list[bytes]) -> None:
    learner = learn()
    learner.datums(2).unlink()
    with pytest.raises(CheckpointError, match=r"00002\.parquet is gone, but step 2 must be replay"):
        advance(learner, 3, 3)


def test_a_client_that_the_service_forgot_is_rebuilt(
    learn: Learn, address: Address, undisturbed: list[bytes]
) -> None:
    with connected(address) as passing:
        learner = learn()
        learner.service = replace(learner.service, client=passing)
        advance(learner, 2, 2)
        finish(address, passing.holder.get_session_id())  # as when an engine is started anew
        learner.service = learn().service
        with pytest.raises(ServiceFailed, match="The training client is rebuilt"):
            advance(learner, 3, 3)
        advance(learner, 3, 3)
    assert weights(learner, address) == undisturbed


def finish(address: Address, session: str) -> None:
    url = f"{address.url}/api/v1/sessions/{session}/finish"
    ended = {"reason": {"type": "success"}, "detail": None}
    httpx.post(url, json=ended, headers={"X-API-Key": address.key}).raise_for_status()


def _fail(*_: object) -> Checkpoint:
    raise ServiceFailed("the network is gone")
