"""Lost weights are rebuilt from what was recorded, and probed before they are used."""

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import httpx
import pyarrow as pa
import pytest
import tinker
from prefect.utilities.collections import visit_collection
from safetensors.torch import load

from ratchet.adapters.calls import POLICY
from ratchet.adapters.door.door import Door
from ratchet.adapters.errors import UserError
from ratchet.adapters.player_protocol import PlaySettings
from ratchet.adapters.tinker.engines import TinkerServer
from ratchet.adapters.tinker.live_policy import LivePolicy, LoraSpec
from ratchet.adapters.tinker.service import Service, ServiceFailed
from ratchet.tasks.checkpoints import Checkpoint, Ledger, policy_version
from ratchet.tasks.datums import DATUM_SCHEMA, UpdateMethod
from ratchet.tasks.recovery.recorded_steps import TrainedPolicy
from ratchet.tasks.rollouts import RolloutHost
from ratchet.tasks.settings.run import Optimizer
from ratchet.tasks.storage.files import Damaged
from ratchet.tasks.storage.run_folder import RunFolder
from ratchet.tasks.storage.tables import write_table
from ratchet.tasks.updates import PolicyUpdater, StepUpdate, update_policy
from tests.support.credited import credited, recorded_steps
from tests.support.damages import delete_the_folder, flip
from tests.support.door.opened_door import CHAT
from tests.support.servers.engine_server import Address, connected

STEPS = 4
ADAM = Optimizer(learning_rate=1e-2)
METHOD = UpdateMethod("importance_sampling", {}, ADAM, STEPS)
PROMPT, ANSWER = [1, 2, 3], 5

MakeUpdater = Callable[..., PolicyUpdater]


def is_even(step: int) -> bool:
    """Return whether checkpoint `step` saves its training state."""
    return step % 2 == 0


@pytest.fixture(scope="module")
def connection(address: Address, service: tinker.ServiceClient) -> Service:
    return Service(service, TinkerServer(address.url, address.key, Future(), None), patience=60)


@pytest.fixture
def make_updater(connection: Service, address: Address, tmp_path: Path) -> MakeUpdater:
    """Make an updater of the run in tmp_path, as a process that has just started has it."""

    def make(
        rank: int = 4,
        seed: int = 7,
        probe_tolerance: float | None = 1e-4,
        method: UpdateMethod = METHOD,
    ) -> PolicyUpdater:
        run = RunFolder(tmp_path)
        lora = LoraSpec(
            address.base_model, rank, seed, train_attn=True, train_mlp=True, train_unembed=True
        )
        policy = TrainedPolicy(POLICY, (POLICY,), lora)
        recorded = recorded_steps(run, policy, credited("centred"), method)
        ledger = Ledger(run.checkpoints(POLICY))
        return PolicyUpdater(connection, ledger, recorded, is_even, None, probe_tolerance)

    return make


def datums_of(updater: PolicyUpdater, step: int) -> Path:
    return updater.recorded.run.datums(POLICY, step)


def sampled_datums(updater: PolicyUpdater, checkpoint: Checkpoint, path: Path) -> Path:
    """Write what the checkpoint samples, with advantages of 1 and -1; step 1 has no datum."""
    rows = []
    for number in range(0 if checkpoint.step == 1 else 2):
        params = tinker.SamplingParams(max_tokens=ANSWER, seed=number, stop=[])
        client = updater.service.client.create_sampling_client(model_path=checkpoint.sampler)
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
            "scale": 1.0,
        }
        named = {"rollout_id": f"r{number}", "group_id": "g", "role": "policy", "first_call": 0}
        rows.append(
            {
                **named,
                "policy_version": policy_version(POLICY, checkpoint.step),
                "reward": 0.0,
                "advantage": sign,
                **lists,
            }
        )
    return write_table(pa.Table.from_pylist(rows, schema=DATUM_SCHEMA), path)


def advance(updater: PolicyUpdater, first: int, last: int) -> list[dict[str, float]]:
    """Do steps `first` to `last`; return the probe of each. Every second state is saved."""
    updater.make_initial()
    probes = []
    for step in range(first, last + 1):
        path = datums_of(updater, step)
        if not path.exists():
            sampled_datums(updater, updater.ledger.at(step), path)
        update = updater.update(step, [path])
        probes.append(update.checks)
    return probes


def tensors(updater: PolicyUpdater, address: Address) -> list[bytes]:
    """Read the last state's tensors and optimizer."""
    state = updater.ledger.states(STEPS)[0].state
    assert state is not None
    name = state.removeprefix("tinker://")
    files = sorted(address.state.rglob(f"{name}.*/*.safetensors"))
    assert len(files) == 2
    return [file.read_bytes() for file in files]


@pytest.fixture
def undisturbed(make_updater: MakeUpdater, address: Address, tmp_path: Path) -> list[bytes]:
    """The weights of a run of four steps, whose ledger is then cut after the third."""
    return train_whole(make_updater(), address, tmp_path)


def train_whole(updater: PolicyUpdater, address: Address, run: Path) -> list[bytes]:
    """Train four steps, cut the ledger after the third, and return the weights."""
    assert advance(updater, 0, STEPS - 1) == [{}] * STEPS
    made = tensors(updater, address)
    ledger = run / "checkpoints.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join(line for line in lines if json.loads(line)["step"] < STEPS))
    return made


@pytest.mark.parametrize(
    ("loss", "settings", "substeps", "epochs"),
    [("dual_clip", {"dual_clip": 1.1}, 2, 2), ("rec", {"regularizer": "k2"}, 1, 2)],
)
def test_several_optimizer_steps_of_a_loss_by_weights_are_rebuilt_to_the_bit(
    make_updater: MakeUpdater,
    address: Address,
    tmp_path: Path,
    loss: str,
    settings: dict[str, float | str],
    substeps: int,
    epochs: int,
) -> None:
    schedule = {"schedule": "cosine", "warmup_steps": 1, "substeps": substeps, "epochs": epochs}
    method = UpdateMethod(loss, settings, ADAM.model_copy(update=schedule), STEPS)
    undisturbed = train_whole(make_updater(method=method), address, tmp_path)
    updater = make_updater(method=method)
    (probe,) = advance(updater, 3, 3)
    assert tensors(updater, address) == undisturbed
    # The state of checkpoint 2 has the optimizer steps of step 0 alone, for step 1 had no datum.
    assert probe["probe/optimizer_step"] == substeps * epochs + 1
    assert probe["probe/max_difference"] <= 1e-5


@pytest.fixture
def train_by(
    make_updater: MakeUpdater, address: Address, tmp_path: Path
) -> Callable[..., list[bytes]]:
    """Train one step, on the same datums whichever the method, and return the weights."""

    def train(loss: str, settings: dict[str, float], epochs: int = 1) -> list[bytes]:
        (tmp_path / "checkpoints.jsonl").unlink(missing_ok=True)
        optimizer = ADAM.model_copy(update={"epochs": epochs})
        method = UpdateMethod(loss, settings, optimizer, STEPS)
        updater = make_updater(method=method)
        advance(updater, 0, 1)  # step 1 has no datum, and saves a state
        return tensors(updater, address)

    return train


def test_on_policy_one_step_of_ppo_is_importance_sampling_to_the_bit(
    train_by: Callable[..., list[bytes]],
) -> None:
    """At ratio 1 nothing is clipped; a second epoch is not at ratio 1, and differs."""
    clips = {"clip_low_threshold": 0.9999, "clip_high_threshold": 1.0001}
    assert train_by("ppo", clips) == train_by("importance_sampling", {})
    assert train_by("ppo", clips, 2) != train_by("importance_sampling", {}, 2)


@pytest.mark.parametrize("loss", ["dro", "dual_clip", "sapo", "topr", "sppo"])
def test_on_policy_a_loss_by_weights_is_reinforce_up_to_rounding(
    train_by: Callable[..., list[bytes]], loss: str
) -> None:
    """The log-probabilities of sampler and trainer differ by their rounding alone."""
    plain, by_weights = train_by("cross_entropy", {}), train_by(loss, {})
    assert len(plain) == 2
    for made, expected in zip(by_weights, plain, strict=True):
        theirs, ours = load(expected), load(made)
        apart = max(float((theirs[name] - ours[name]).abs().max()) for name in theirs)
        assert apart <= 1e-4


@pytest.mark.parametrize("gone", [[2], [0, 2]], ids=["the newest", "every one"])
def test_an_older_state_and_more_repeated_steps_replace_a_state_that_is_gone(
    gone: list[int],
    make_updater: MakeUpdater,
    rest: tinker.RestClient,
    address: Address,
    undisturbed: list[bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    updater = make_updater()
    for step in gone:
        state = updater.ledger.at(step).state
        assert state is not None
        rest.delete_checkpoint_from_tinker_path(state).result()
    (probe,) = advance(updater, 3, 3)
    assert tensors(updater, address) == undisturbed
    assert probe["probe/optimizer_step"] == 1
    assert "An older state is taken, and more steps are applied again" in caplog.text
    assert ("no saved state is left" in caplog.text) == (gone == [0, 2])


def test_sampler_weights_that_are_gone_are_made_again(
    make_updater: MakeUpdater,
    rest: tinker.RestClient,
    address: Address,
    undisturbed: list[bytes],
    tmp_path: Path,
) -> None:
    updater = make_updater()
    rest.delete_checkpoint_from_tinker_path(updater.ledger.at(3).sampler).result()
    updater.sampler(3)
    again = sampled_datums(updater, updater.ledger.at(3), tmp_path / "again.parquet")
    assert again.read_bytes() == datums_of(updater, 3).read_bytes()

    (probe,) = advance(updater, 3, 3)  # the client that saved them is live, but not yet probed
    assert set(probe) == {"probe/max_difference", "probe/optimizer_step"}
    assert tensors(updater, address) == undisturbed


@pytest.mark.parametrize("step", [1, 3], ids=["an older checkpoint", "the newest"])
@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
@pytest.mark.parametrize("damage", [flip, delete_the_folder])
def test_damaged_sampler_weights_are_made_again_with_the_same_bytes(
    make_updater: MakeUpdater,
    address: Address,
    undisturbed: list[bytes],
    step: int,
    name: str,
    damage: Callable[[Path], None],
) -> None:
    updater = make_updater()
    saved = updater.ledger.at(step).sampler
    file = sampler_file(address, saved, name)
    whole = file.read_bytes()
    damage(file)
    assert updater.sampler(step).path == updater.ledger.at(step).sampler != saved
    assert file.read_bytes() == whole
    assert updater.service.sampler(saved).path == saved
    advance(updater, 3, 3)
    assert tensors(updater, address) == undisturbed


def test_weights_that_are_damaged_under_an_open_sampler_are_made_again(
    make_updater: MakeUpdater, address: Address, undisturbed: list[bytes]
) -> None:
    updater = make_updater()
    params = tinker.SamplingParams(max_tokens=ANSWER, seed=3, stop=[])
    samplers = [updater.sampler(1) for _ in range(2)]  # weights are read at the first call
    saved = updater.ledger.at(1).sampler
    delete_the_folder(sampler_file(address, saved, "adapter_model.safetensors"))
    asked = samplers[0].sample(tinker.ModelInput.from_ints(PROMPT), 1, params)
    [answered] = asyncio.run(asked).sequences
    [scored] = samplers[1].score([[*PROMPT, *answered.tokens]], [ANSWER])
    assert scored == pytest.approx(answered.logprobs, abs=1e-4)
    assert samplers[0].path != saved


def test_weights_that_nothing_can_make_again_are_refused_by_what_is_gone(
    make_updater: MakeUpdater, address: Address, undisturbed: list[bytes]
) -> None:
    updater = make_updater()
    sampler = updater.sampler(1)
    sampler_file(address, sampler.path, "adapter_model.safetensors").unlink()
    datums_of(updater, 0).unlink()
    with pytest.raises(UserError, match=r"00000\.parquet is gone, but step 0 must be"):
        sampler.score([[*PROMPT, ANSWER]], [1])


def sampler_file(address: Address, saved: str, name: str) -> Path:
    [file] = address.state.glob(f"tensors/{saved.removeprefix('tinker://')}.*/{name}")
    return file


def test_resume_stops_when_the_seed_makes_other_weights(
    make_updater: MakeUpdater, rest: tinker.RestClient, address: Address, undisturbed: list[bytes]
) -> None:
    other = make_updater(rank=2, seed=8)
    for step in (0, 2):
        state = other.ledger.at(step).state
        assert state is not None
        rest.delete_checkpoint_from_tinker_path(state).result()
    with pytest.raises(UserError, match=r"untrained LoRA of seed 8 .* off by .* allows 0\.0001"):
        advance(other, 3, 3)


def test_resume_stops_when_rebuilt_weights_differ(
    make_updater: MakeUpdater, undisturbed: list[bytes]
) -> None:
    updater = make_updater()
    wrong = updater.ledger.at(0)
    updater.ledger.add(Checkpoint(3, updater.ledger.at(3).sampler, wrong.state))
    with pytest.raises(UserError, match=r"recorded at step 3.*Nothing was applied"):
        advance(updater, 3, 3)
    assert updater.ledger.in_doubt() is None
    assert updater.ledger.last_step() == 3


def test_a_tolerance_of_none_only_reports(
    make_updater: MakeUpdater, undisturbed: list[bytes]
) -> None:
    updater = make_updater(probe_tolerance=None)
    wrong = updater.ledger.at(0)
    updater.ledger.add(Checkpoint(3, updater.ledger.at(3).sampler, wrong.state))
    with pytest.raises(UserError, match=r"first step is number 1, but .* make it number 3"):
        advance(updater, 3, 3)
    assert updater.ledger.last_step() == 3


def test_a_service_that_does_not_count_its_steps_is_said_to_be_unknown(
    make_updater: MakeUpdater,
    undisturbed: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    result = LivePolicy.result
    monkeypatch.setattr(
        LivePolicy, "result", lambda *given: replace(result(*given), optimizer_step=None)
    )
    (probe,) = advance(make_updater(), 3, 3)
    assert set(probe) == {"probe/max_difference"}
    assert "kept its moments is unknown" in caplog.text


def test_an_update_in_doubt_is_made_again_on_rebuilt_weights(
    make_updater: MakeUpdater,
    address: Address,
    undisturbed: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    updater = make_updater()
    with monkeypatch.context() as patch:
        patch.setattr(LivePolicy, "saved", _fail)
        with pytest.raises(ServiceFailed):
            advance(updater, 3, 3)
    assert updater.ledger.in_doubt() == 4

    advance(updater, 3, 3)
    assert updater.ledger.in_doubt() is None
    assert tensors(updater, address) == undisturbed


def test_an_update_is_complete_with_its_file_and_not_with_its_checkpoint(
    make_updater: MakeUpdater, address: Address, tmp_path: Path, undisturbed: list[bytes]
) -> None:
    """A kill after `saved` and before the update's file has the update made again, with no harm."""
    advance(make_updater(), 3, 3)
    assert tensors(make_updater(), address) == undisturbed
    updater = make_updater()
    datums, path = datums_of(updater, 3), updater.recorded.run.update(POLICY, 3)
    update_policy.make(path, updater, StepUpdate(3, lambda: [datums]))
    assert [c.step for c in updater.ledger.checkpoints()].count(4) == 2
    assert tensors(updater, address) == undisturbed


def test_what_is_done_during_an_update_is_done_after_its_begin_and_before_its_checkpoint(
    make_updater: MakeUpdater, address: Address, undisturbed: list[bytes]
) -> None:
    updater, seen = make_updater(), list[tuple[int | None, int]]()

    def look() -> None:
        seen.append((updater.ledger.in_doubt(), updater.ledger.last_step()))

    updater.update(3, [datums_of(updater, 3)], [look, look])
    assert seen == [(4, 3), (4, 3)]
    assert tensors(updater, address) == undisturbed


def test_an_error_during_an_update_leaves_it_in_doubt_to_be_made_again_on_rebuilt_weights(
    make_updater: MakeUpdater, address: Address, undisturbed: list[bytes]
) -> None:
    updater = make_updater()

    def fail() -> None:
        raise Damaged("the spans are damaged")

    with pytest.raises(Damaged):
        updater.update(3, [datums_of(updater, 3)], [fail])
    assert updater.ledger.in_doubt() == 4
    updater.update(3, [datums_of(updater, 3)])
    assert updater.ledger.in_doubt() is None
    assert tensors(updater, address) == undisturbed


def test_a_client_that_the_service_forgot_is_rebuilt(
    make_updater: MakeUpdater, address: Address, connection: Service, undisturbed: list[bytes]
) -> None:
    with connected(address) as passing:
        updater = make_updater()
        updater.service = Service(passing, connection.server)
        advance(updater, 2, 2)
        finish(address, passing.holder.get_session_id())  # as when an engine is started anew
        updater.service = make_updater().service
        with pytest.raises(ServiceFailed, match="The training client is rebuilt"):
            advance(updater, 3, 3)
        advance(updater, 3, 3)
    assert tensors(updater, address) == undisturbed


def finish(address: Address, session: str) -> None:
    url = f"{address.url}/api/v1/sessions/{session}/finish"
    ended = {"reason": {"type": "success"}, "detail": None}
    key = {"X-API-Key": address.key}
    httpx.post(url, json=ended, headers=key, timeout=None).raise_for_status()


def _fail(*_: object) -> Checkpoint:
    raise ServiceFailed("the network is gone")


def test_prefect_does_not_look_into_what_changes_while_a_task_begins(
    make_updater: MakeUpdater, connection: Service, tmp_path: Path
) -> None:
    settings = PlaySettings("hello", [POLICY], 4, 60)
    with Door(CHAT, {}, run_seed=0) as door:
        server = RolloutHost(RunFolder(tmp_path), door, connection, settings)
        updater, seen = make_updater(), list[object]()
        visit_collection([server, updater], seen.append, return_data=False)
    assert seen[-2:] == [server, updater]
    assert not any(one is connection or one is connection.sampling for one in seen)
