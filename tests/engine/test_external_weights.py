"""External weights: an adapter that the SDK downloads by signed URLs, and nobody else can."""

import json
import urllib.error
import urllib.request

import httpx
import pytest
import tinker
from safetensors.torch import load, load_file

from ratchet.engine.api import run_routes
from ratchet.engine.state.checkpoints import CheckpointAddress
from tests.support.servers.engine_server import Address

FILES = {"adapter_config.json", "adapter_model.safetensors"}


@pytest.fixture(scope="module")
def client(service: tinker.ServiceClient, address: Address) -> tinker.TrainingClient:
    create = service.create_lora_training_client
    return create(base_model=address.base_model, rank=4, seed=1).result()


@pytest.fixture(scope="module")
def external(client: tinker.TrainingClient) -> str:
    return client.save_weights_external("given").result().path


@pytest.fixture(scope="module")
def urls(external: str, rest: tinker.RestClient) -> dict[str, str]:
    return rest.get_external_weights_urls(external).result().urls


def fetched(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return answer.read()


def refused(url: str) -> int:
    with pytest.raises(urllib.error.HTTPError) as caught:
        fetched(url)
    caught.value.close()
    return caught.value.code


def test_the_files_are_a_lora_under_the_names_of_the_services_exports(
    client: tinker.TrainingClient, urls: dict[str, str], address: Address
) -> None:
    assert urls.keys() == FILES
    config = json.loads(fetched(urls["adapter_config.json"]))
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 32)
    tensors = load(fetched(urls["adapter_model.safetensors"]))
    head = "base_model.model.model.unembed_tokens.lora_A.weight"
    assert tensors[head].shape == (4, 64)
    assert "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight" in tensors
    saved = CheckpointAddress.parse(client.save_state("same").result().path)
    [state] = (address.state / "tensors" / saved.run / saved.kind).glob("same.*")
    own = load_file(state / "adapter_model.safetensors")
    assert len(own) == len(tensors)
    assert own["base_model.model.lm_head.lora_A.weight"].equal(tensors[head])


def test_a_url_opens_its_file_alone_and_for_a_while(
    external: str, urls: dict[str, str], rest: tinker.RestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = urls["adapter_config.json"]
    assert refused(url.replace("adapter_config.json", "adapter_model.safetensors")) == 401
    assert refused(url.partition("?")[0]) == 401
    assert refused(url.replace("expires=", "expires=1")) == 401
    monkeypatch.setattr(run_routes, "SECONDS", -1)
    assert (
        refused(rest.get_external_weights_urls(external).result().urls["adapter_config.json"])
        == 401
    )


def test_external_weights_are_listed_and_deleted_as_other_checkpoints(
    client: tinker.TrainingClient, rest: tinker.RestClient
) -> None:
    path = client.save_weights_external("once", ttl_seconds=3600).result().path
    listed = rest.list_checkpoints(client.model_id).result().checkpoints
    found = next(one for one in listed if one.tinker_path == path)
    assert (found.checkpoint_type, found.expires_at is None) == ("external", False)
    rest.delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.NotFoundError, match="never saved, or was deleted"):
        rest.get_external_weights_urls(path).result()


def test_what_external_weights_are_not_for_is_refused(
    client: tinker.TrainingClient, service: tinker.ServiceClient, external: str, address: Address
) -> None:
    with pytest.raises(tinker.TinkerError, match="holds external_weights, which cannot be loaded"):
        service.create_training_client_from_state(external).result()
    state = client.save_state("kept").result().path
    run, kind, name = state.removeprefix("tinker://").split("/")
    asked = f"training_runs/{run}/checkpoints/{kind}/{name}/external_weights_urls"
    answer = httpx.get(f"{address.url}/api/v1/{asked}", headers={"X-API-Key": address.key})
    assert answer.status_code == 400
    assert "is not for download; load its training state" in answer.json()["detail"]
    with pytest.raises(tinker.TinkerError, match="leave out age_encryption_recipients"):
        client.save_weights_external("locked", age_encryption_recipients=["age1x"]).result()
