"""A LoRA that the service gives out is the same beside a base's weights and in them."""

import json
import shutil
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from safetensors.torch import load_file, save_file
from tinker import AdamParams, Datum, ModelInput
from transformers import LlamaConfig, LlamaForCausalLM

from ratchet.adapters.errors import UserError
from ratchet.adapters.tinker.engines import TinkerServer
from ratchet.adapters.tinker.live_policy import LivePolicy, apart, download, fetch_weights
from ratchet.adapters.tinker.service import Service, ServiceFailed
from ratchet.adapters.weights.adapter import (
    TENSORS,
    Adapter,
    read_adapter,
    read_base,
    write_adapter,
)
from ratchet.adapters.weights.network import (
    check_fit,
    head_of,
    is_tied,
    load_network,
    load_with_adapter,
    merge,
    merge_folder,
    save_network,
    score,
)
from tests.support.servers.engine_server import connected, make_tiny_model, serving

TOLERANCE = 1e-4
SEQUENCES = [[*range(7, 40)], [5, 200, 99, 5, 5, 260, 1, 14]]


@dataclass(frozen=True)
class Trained:
    """A base, what the service gives out of a LoRA on it, and the sampler's log-probabilities."""

    base: Path
    tied: bool
    given: Path
    expected: list[Any]

    @property
    def adapter(self) -> Adapter:
        return replace(read_adapter(self.given, "lm_head"), base=str(self.base))

    def difference(self, network: Any) -> float:
        scored = score(network, SEQUENCES)
        return apart(np.concatenate(scored), np.concatenate(self.expected))


def make_untied_llama(folder: Path) -> Path:
    """Save a random model of two layers, whose head is not its embedding."""
    make_tiny_model(folder)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=264,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=258,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["tied", "untied"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder, tied = tmp_path_factory.mktemp("exported"), request.param == "tied"
    base = (make_tiny_model if tied else make_untied_llama)(folder / "base")
    given = folder / "given"
    given.mkdir()
    with serving(base, folder / "state") as address, connected(address) as client:
        service = Service(client, TinkerServer(address.url, address.key, Future(), None))
        create = client.create_lora_training_client
        training = create(base_model=address.base_model, rank=4, seed=1).result()
        targets = {"target_tokens": SEQUENCES[0][1:], "weights": [1.0] * 32}
        datum = Datum(model_input=ModelInput.from_ints(SEQUENCES[0][:-1]), loss_fn_inputs=targets)  # type: ignore[arg-type]
        for _ in range(4):
            training.forward_backward([datum], "cross_entropy")
            training.optim_step(AdamParams(learning_rate=0.02)).result()
        fetch_weights(service, LivePolicy(service, training), given)
        rest = tinker.RestClient(base_url=address.url, api_key=address.key)
        listed = rest.list_checkpoints(training.model_id).result()
        assert listed.checkpoints == []  # the service keeps nothing of what it has given out
        sampler = service.sampler(training.save_weights_for_sampler("now").result().path)
        expected = sampler.score(SEQUENCES, [len(tokens) - 1 for tokens in SEQUENCES])
    return Trained(base, tied, given, expected)


def test_an_adapter_that_peft_loads_is_what_the_service_samples(
    trained: Trained, tmp_path: Path
) -> None:
    network = load_network(trained.base)
    assert is_tied(network) == trained.tied
    assert trained.difference(network) > 100 * TOLERANCE
    write_adapter(trained.adapter, tmp_path)
    assert read_base(tmp_path) == str(trained.base)
    assert trained.difference(load_with_adapter(network, tmp_path)) <= TOLERANCE


def test_merged_weights_are_what_the_service_samples(trained: Trained, tmp_path: Path) -> None:
    network = load_network(trained.base)
    embedding = network.get_input_embeddings().weight.clone()  # type: ignore[union-attr]
    merge(network, trained.adapter)
    save_network(network, tmp_path)
    loaded = load_network(tmp_path)
    assert trained.difference(loaded) <= TOLERANCE
    assert not is_tied(loaded)
    assert loaded.get_input_embeddings().weight.equal(embedding)  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings:UserWarning")
def test_peft_merges_an_adapter_of_a_tied_head_into_another_model(
    trained: Trained, tmp_path: Path
) -> None:
    write_adapter(trained.adapter, tmp_path)
    merged: Any = load_with_adapter(load_network(trained.base), tmp_path)
    assert (trained.difference(merged.merge_and_unload()) <= TOLERANCE) is not trained.tied


def test_an_adapter_of_pefts_form_is_merged_into_a_folder_of_its_own(
    trained: Trained, tmp_path: Path
) -> None:
    adapter, folder = tmp_path / "adapter", tmp_path / "merged"
    adapter.mkdir()
    write_adapter(trained.adapter, adapter)
    (adapter / "tokenizer.json").write_text("{}")
    merge_folder(trained.base, adapter, folder)
    assert trained.difference(load_network(folder)) <= TOLERANCE
    assert (folder / "tokenizer.json").is_file()
    assert not (folder / TENSORS).exists()


def test_without_a_trained_head_a_tied_model_stays_tied(trained: Trained) -> None:
    adapter = trained.adapter
    inner = {name: pair for name, pair in adapter.layers.items() if name != adapter.head}
    network = load_network(trained.base)
    merge(network, replace(adapter, layers=inner))
    assert is_tied(network) == trained.tied


def test_bfloat16_halves_the_weights_and_is_farther_off(trained: Trained, tmp_path: Path) -> None:
    network = load_network(trained.base)
    merge(network, trained.adapter)
    exact, half = tmp_path / "exact", tmp_path / "half"
    save_network(network, exact)
    save_network(network, half, "bfloat16")
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (exact, half)]
    assert sizes[1] < 0.6 * sizes[0]
    assert trained.difference(load_network(half)) > trained.difference(load_network(exact))


def changed(trained: Trained, folder: Path, config: dict[str, Any], **tensors: Any) -> Path:
    """Copy what the service gave out, with other keys and tensors."""
    shutil.copytree(trained.given, folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    save_file(load_file(folder / TENSORS) | tensors, folder / TENSORS)
    return folder


def test_files_that_are_no_plain_lora_are_refused(trained: Trained, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has use_rslora, which is not read; give a plain LoRA"):
        read_adapter(changed(trained, tmp_path / "a", {"use_rslora": True}), "lm_head")
    experts = {f"x.lora_{matrix}.weight": torch.zeros(2, 2, 2) for matrix in "AB"}
    with pytest.raises(UserError, match=r"x\.lora_.\.weight .* not one of a pair"):
        read_adapter(changed(trained, tmp_path / "b", {}, **experts), "lm_head")
    with pytest.raises(UserError, match="names no base_model_name_or_path; give it one"):
        read_base(trained.given)


def test_an_adapter_of_another_base_is_refused(trained: Trained) -> None:
    network, adapter = load_network(trained.base), trained.adapter
    check_fit(adapter, network)
    pair = adapter.layers["lm_head"]
    other = replace(adapter, layers={"model.layers.9.mlp.up_proj": pair})
    with pytest.raises(UserError, match=r"up_proj of shape .* is not there in the base"):
        check_fit(other, network)
    other = replace(adapter, layers={"model.layers.0.mlp.up_proj": pair})
    with pytest.raises(UserError, match=r"has the shape .* in the base; look whether the"):
        check_fit(other, network)
    assert head_of(network) == "lm_head"


def test_a_download_that_fails_names_the_file_and_not_its_url(tmp_path: Path) -> None:
    with pytest.raises(ServiceFailed, match="one cannot be downloaded") as caught:
        download("http://127.0.0.1:9/secret", tmp_path / "one")
    assert "secret" not in str(caught.value)
