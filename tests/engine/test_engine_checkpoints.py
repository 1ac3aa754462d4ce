"""Checkpoints of the engine: loading, listing, publishing, expiry and restarts."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import tinker
from tinker import types

from ratchet.adapters.tinker.engines import damaged_weights
from ratchet.engine.core import EngineCore
from ratchet.engine.errors import NotFound, RequestRefused
from ratchet.engine.model.base_models import BaseModel
from ratchet.engine.model.language_model import LanguageModel
from ratchet.engine.model.lora import LoraConfig, LoraWeights
from ratchet.engine.state.checkpoints import (
    CheckpointAddress,
    CheckpointRecord,
    CheckpointStore,
    SaveOptions,
)
from ratchet.engine.state.registry import find_damaged_state
from ratchet.engine.training.trainer import Trainer
from tests.support.damages import DAMAGES, delete_the_folder, flip
from tests.support.servers.engine_server import Address, connected

ADAM = types.AdamParams(learning_rate=1e-2)
PROMPT = types.ModelInput.from_ints([1, 2, 3])
DATUM = types.Datum(
    model_input=types.ModelInput.from_ints([1, 2, 3]),
    loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},  # type: ignore[dict-item]
)

ADDRESS = "tinker://run/weights/a"

Restartable = Callable[[], AbstractContextManager[Address]]


def created(service: tinker.ServiceClient, address: Address) -> tinker.TrainingClient:
    return service.create_lora_training_client(
        base_model=address.base_model, rank=4, seed=1, user_metadata={"who": "me"}
    ).result()


def step(client: tinker.TrainingClient) -> float:
    loss = client.forward_backward([DATUM], "cross_entropy")
    client.optim_step(ADAM).result()
    return loss.result().metrics["loss:sum"]


def paths(rest: tinker.RestClient) -> list[str]:
    return [one.tinker_path for one in rest.list_user_checkpoints().result().checkpoints]


def test_client_from_state_with_optimizer_continues_with_the_same_bits(
    service: tinker.ServiceClient, address: Address
) -> None:
    client = created(service, address)
    for _ in range(3):
        step(client)
    path = client.save_state("third").result().path
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    assert resumed.model_id != client.model_id
    assert resumed.get_info().lora_rank == 4
    assert [step(resumed) for _ in range(3)] == [step(client) for _ in range(3)]


def test_client_from_state_without_optimizer_starts_with_zero_moments(
    service: tinker.ServiceClient, address: Address
) -> None:
    client = created(service, address)
    for _ in range(3):
        step(client)
    path = client.save_state("third").result().path
    fresh = service.create_training_client_from_state(path).result()
    ours, theirs = [step(client) for _ in range(2)], [step(fresh) for _ in range(2)]
    assert ours[0] == theirs[0]
    assert ours[1] != theirs[1]


@pytest.mark.filterwarnings("ignore:DEPRECATED:FutureWarning")
def test_live_client_can_load_an_earlier_checkpoint(
    service: tinker.ServiceClient, address: Address
) -> None:
    client = created(service, address)
    step(client)
    path = client.save_state("first").result().path
    after = [step(client) for _ in range(2)]
    client.load_state_with_optimizer(path).result()
    assert [step(client) for _ in range(2)] == after
    client.load_state(path).result()
    assert step(client) == after[0]


def test_saving_under_a_taken_name_needs_overwrite_or_delete(
    service: tinker.ServiceClient, rest: tinker.RestClient, address: Address
) -> None:
    client = created(service, address)
    path = client.save_state("same", user_metadata={"n": "1"}).result().path
    with pytest.raises(tinker.RequestFailedError, match="overwrite=True"):
        client.save_state("same").result()
    assert client.save_state("same", overwrite=True).result().path == path
    listed = rest.list_checkpoints(client.model_id).result().checkpoints
    assert [(one.tinker_path, one.user_metadata) for one in listed] == [(path, None)]
    client.save_weights_for_sampler("same").result()
    with pytest.raises(tinker.RequestFailedError, match="another name"):
        client.save_weights_for_sampler("same").result()
    rest.delete_checkpoint_from_tinker_path(path).result()
    client.save_state("same").result()


def test_checkpoints_are_listed_newest_first_with_metadata(
    service: tinker.ServiceClient, rest: tinker.RestClient, address: Address
) -> None:
    client = created(service, address)
    state = client.save_state("a", ttl_seconds=3600, user_metadata={"k": "v"}).result().path
    sampler = client.save_weights_for_sampler("b").result().path
    assert paths(rest)[:2] == [sampler, state]
    run = rest.get_training_run(client.model_id).result()
    assert (run.base_model, run.lora_rank, run.user_metadata) == (
        address.base_model,
        4,
        {"who": "me"},
    )
    saved, sampled = run.last_checkpoint, run.last_sampler_checkpoint
    assert saved is not None
    assert sampled is not None
    assert (saved.checkpoint_id, saved.checkpoint_type) == ("weights/a", "training")
    assert (sampled.checkpoint_id, sampled.checkpoint_type) == ("sampler_weights/b", "sampler")
    assert saved.user_metadata == {"k": "v"}
    assert saved.expires_at is not None
    assert saved.expires_at - saved.time == pytest.approx(timedelta(hours=1), abs=timedelta(1e-3))
    assert (saved.size_bytes or 0) > (sampled.size_bytes or 0) > 1000
    first = rest.list_user_checkpoints(limit=1).result()
    assert [one.tinker_path for one in first.checkpoints] == [sampler]
    assert first.cursor is not None
    assert first.cursor.total_count == len(paths(rest))
    runs = rest.list_training_runs(limit=1).result()
    assert [one.training_run_id for one in runs.training_runs] == [client.model_id]
    by_path = rest.get_training_run_by_tinker_path(state).result()
    assert by_path.training_run_id == client.model_id


def test_checkpoint_is_published_and_unpublished(
    service: tinker.ServiceClient, rest: tinker.RestClient, address: Address
) -> None:
    client = created(service, address)
    path = client.save_state("p").result().path

    def public() -> bool:
        return rest.list_checkpoints(client.model_id).result().checkpoints[0].public

    rest.publish_checkpoint_from_tinker_path(path).result()
    assert public()
    rest.unpublish_checkpoint_from_tinker_path(path).result()
    assert not public()


def test_expired_checkpoint_is_not_listed_and_loading_it_names_the_expiry(
    service: tinker.ServiceClient,
    rest: tinker.RestClient,
    address: Address,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passed = [timedelta(0)]

    def is_expired(store: CheckpointStore, record: CheckpointRecord) -> bool:
        return record.expires_at is not None and record.expires_at <= store._now() + passed[0]

    monkeypatch.setattr(CheckpointStore, "_is_expired", is_expired)
    client = created(service, address)
    kept = client.save_state("kept", ttl_seconds=3600).result().path
    brief = client.save_state("brief").result().path
    rest.set_checkpoint_ttl_from_tinker_path(kept, None).result()
    rest.set_checkpoint_ttl_from_tinker_path(brief, 3600).result()
    assert brief in paths(rest)
    passed[0] = timedelta(hours=2)
    assert kept in paths(rest)
    assert brief not in paths(rest)
    for load in (
        lambda: service.create_training_client_from_state(brief).result(),
        lambda: service.create_sampling_client(model_path=brief).result(),
        lambda: rest.get_weights_info_by_tinker_path(brief).result(),
        lambda: rest.publish_checkpoint_from_tinker_path(brief).result(),
    ):
        with pytest.raises(tinker.NotFoundError, match="expired at"):
            load()
    assert list(address.state.rglob("brief.*/*")) == []
    assert list(address.state.rglob("kept.*/*")) != []


def test_saved_weights_survive_a_restart_and_lost_clients_name_the_last_checkpoint(
    restartable: Restartable,
) -> None:
    with restartable() as address, connected(address) as service:
        client = created(service, address)
        unsaved = created(service, address)
        step(client)
        path = client.save_state("s", user_metadata={"n": "1"}, ttl_seconds=7200).result().path
        sampled = client.save_weights_for_sampler("w").result().path
        logprobs = (
            service.create_sampling_client(model_path=sampled)
            .result()
            .compute_logprobs(PROMPT)
            .result()
        )
        expected = [step(client) for _ in range(2)]
        session_id = service.holder.get_session_id()
    with restartable() as address, connected(address) as service:
        rest = tinker.RestClient(base_url=address.url, api_key=address.key)
        session = rest.get_session(session_id).result()
        assert session.training_run_ids == [client.model_id, unsaved.model_id]
        assert session_id in rest.list_sessions().result().sessions
        listed = rest.list_checkpoints(client.model_id).result().checkpoints
        assert [one.tinker_path for one in listed] == [sampled, path]
        assert listed[1].user_metadata == {"n": "1"}
        assert listed[1].expires_at is not None
        sampler = service.create_sampling_client(model_path=sampled).result()
        assert sampler.compute_logprobs(PROMPT).result() == logprobs
        resumed = service.create_training_client_from_state_with_optimizer(path).result()
        assert [step(resumed) for _ in range(2)] == expected
        resumed.model_id, lost = client.model_id, resumed.model_id
        with pytest.raises(tinker.NotFoundError, match=r"from_state_with_optimizer\('tinker://"):
            resumed.forward([DATUM], "cross_entropy").result()
        resumed.model_id = unsaved.model_id
        with pytest.raises(tinker.NotFoundError, match="create a new training client"):
            resumed.forward([DATUM], "cross_entropy").result()
        resumed.model_id = lost


def test_sampling_client_of_saved_weights_survives_a_restart_and_a_snapshot_does_not(
    restartable: Restartable,
) -> None:
    with restartable() as address, connected(address) as service:
        client = created(service, address)
        path = client.save_weights_for_sampler("w").result().path
        named = service.create_sampling_client(model_path=path).result()
        unnamed = client.save_weights_and_get_sampling_client().result()
        logprobs = named.compute_logprobs(PROMPT).result()
        ids = [one._sampling_session_id for one in (named, unnamed)]
    with restartable() as address, connected(address) as service:
        other = service.create_sampling_client(base_model=address.base_model).result()
        other._sampling_session_id = ids[0]
        assert other.compute_logprobs(PROMPT).result() == logprobs
        other._sampling_session_id = ids[1]
        with pytest.raises(tinker.RequestFailedError, match="save_weights_for_sampler"):
            other.compute_logprobs(PROMPT).result()


def test_training_clients_without_heartbeat_are_released(tiny_model: Path, tmp_path: Path) -> None:
    clock = [datetime(2026, 1, 1, tzinfo=UTC)]
    model = LanguageModel.load(tiny_model)
    engine = EngineCore(BaseModel("local/x", tiny_model), model, tmp_path, now=lambda: clock[0])
    request = types.CreateSessionRequest(tags=[], user_metadata=None, sdk_version="t")
    sessions = [engine.registry.create_session(request).session_id for _ in range(3)]

    def register(session_id: str, number: int) -> None:
        config = LoraConfig(rank=1, seed=0)
        trainer = Trainer(model, LoraWeights.initial(model, config))
        engine.begin_run(f"{session_id}:train:{number}", session_id, trainer, None)

    register(sessions[0], 0)
    register(sessions[1], 0)
    clock[0] += timedelta(hours=3)
    engine.registry.record_heartbeat(sessions[1])
    register(sessions[2], 0)
    assert sorted(engine.live_models) == sorted(f"{one}:train:0" for one in sessions[1:])
    with pytest.raises(NotFound, match="no heartbeat"):
        engine.live_model(f"{sessions[0]}:train:0")
    engine.close(5)


def checkpoints(folder: Path, **clock: Callable[[], datetime]) -> CheckpointStore:
    return CheckpointStore(folder, **clock)


def save(
    store: CheckpointStore, name: str = "a", ttl_seconds: int | None = None, content: str = ""
) -> None:
    def write(folder: Path) -> None:
        (folder / "tensors").write_text(content or name)

    store.save(
        CheckpointAddress("run", "weights", name),
        write,
        "local/tiny",
        LoraConfig(rank=2),
        SaveOptions(ttl_seconds),
    )


def test_failed_save_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    store = checkpoints(tmp_path)
    save(store)

    def fail(folder: Path) -> None:
        (folder / "tensors").write_text("half")
        raise OSError("no space left on device")

    address = CheckpointAddress("run", "weights", "a")
    with pytest.raises(OSError, match="no space"):
        store.save(address, fail, "local/tiny", LoraConfig(rank=2), SaveOptions(overwrite=True))
    for kept in (store, checkpoints(tmp_path)):
        assert (kept.folder(address) / "tensors").read_text() == "a"
    assert len(list(tmp_path.glob("tensors/run/weights/*"))) == 1


def test_files_of_an_interrupted_save_are_deleted(tmp_path: Path) -> None:
    save(checkpoints(tmp_path))
    tensors = tmp_path / "tensors" / "run" / "weights"
    (tensors / "b.0000").mkdir()
    (tensors / ".c.0000.partial").mkdir()
    assert len(checkpoints(tmp_path).find_all()) == 1
    assert len(list(tensors.iterdir())) == 1


@pytest.mark.parametrize("damage", [*DAMAGES.values(), delete_the_folder])
def test_the_same_bytes_saved_again_take_the_place_of_damaged_ones(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    store = checkpoints(tmp_path)
    save(store)
    tensors = store.folder(CheckpointAddress("run", "weights", "a")) / "tensors"
    damage(tensors)
    assert find_damaged_state(tmp_path) == damaged_weights(tmp_path, ADDRESS) == [tensors]
    save(store, "b")
    with pytest.raises(RequestRefused, match="tensors is not as it was written"):
        store.folder(CheckpointAddress("run", "weights", "a"))
    save(store, "c", content="a")
    assert tensors.read_text() == "a"
    assert find_damaged_state(tmp_path) == damaged_weights(tmp_path, ADDRESS) == []


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_record_that_nobody_can_read_counts_as_missing_and_nothing_is_deleted(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    address = CheckpointAddress("run", "weights", "a")
    save(checkpoints(tmp_path))
    tensors = checkpoints(tmp_path).folder(address) / "tensors"
    [record] = (tmp_path / "checkpoints").rglob("*.json")
    damage(record)
    with pytest.raises(NotFound):
        checkpoints(tmp_path).folder(address)
    assert tensors.exists() == (damage is not Path.unlink)  # without a record it is no checkpoint
    assert damaged_weights(tmp_path, ADDRESS) == [record]


def test_damaged_weights_are_refused_when_a_sampler_is_opened(
    service: tinker.ServiceClient, address: Address
) -> None:
    path = created(service, address).save_weights_for_sampler("damaged").result().path
    saved = path.removeprefix("tinker://")
    [weights] = address.state.glob(f"tensors/{saved}.*/adapter_model.safetensors")
    flip(weights)
    with pytest.raises(tinker.BadRequestError, match="is damaged"):
        service.create_sampling_client(model_path=path).result()


def test_checkpoint_expires_while_the_engine_is_stopped(tmp_path: Path) -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    save(checkpoints(tmp_path, now=lambda: now), ttl_seconds=3600)
    before = checkpoints(tmp_path, now=lambda: now + timedelta(seconds=3599))
    assert len(before.find_all()) == 1
    after = checkpoints(tmp_path, now=lambda: now + timedelta(seconds=3600))
    assert after.find_all() == []
    with pytest.raises(NotFound, match="expired at 2026-01-01 01:00:00 UTC"):
        after.find(CheckpointAddress("run", "weights", "a"))
    save(after)  # the name is free again
    assert len(after.find_all()) == 1


@pytest.mark.parametrize(
    "path",
    [
        "tinker://run/weights/..",
        "tinker://../weights/a",
        "tinker://run/weights/a/b",
        "tinker://run/weights/a%2Fb",
        "tinker://run/other/a",
        "tinker://run/weights/",
        "run/weights/a",
        "tinker://run/weights/" + "a" * 201,
    ],
)
def test_invalid_checkpoint_paths_are_refused(path: str) -> None:
    with pytest.raises(RequestRefused):
        CheckpointAddress.parse(path)
