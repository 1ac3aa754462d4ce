from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ratchet.engine.errors import RequestRefused
from ratchet.engine.model.language_model import LanguageModel
from ratchet.engine.model.lora import LoraConfig, LoraWeights
from ratchet.engine.state.checkpoints import load_lora, load_optimizer, save_lora, save_optimizer
from ratchet.engine.training.trainer import Trainer
from tests.support.servers.engine_server import tiny_network


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return LanguageModel(tiny_network(num_hidden_layers=1), "tiny")


CONFIG = LoraConfig(rank=4, seed=1)


def test_saved_weights_load_with_the_same_bits(model: LanguageModel, tmp_path: Path) -> None:
    lora = LoraWeights.initial(model, CONFIG)
    lora.tensors["lm_head.lora_B"].normal_()
    save_lora(lora, tmp_path / "new" / "folder")
    loaded = load_lora(model, CONFIG, tmp_path / "new" / "folder")
    assert loaded.tensors.keys() == lora.tensors.keys()
    assert all(torch.equal(loaded.tensors[name], lora.tensors[name]) for name in lora.tensors)


def test_saved_weights_do_not_follow_training(model: LanguageModel, tmp_path: Path) -> None:
    lora = LoraWeights.initial(model, CONFIG)
    save_lora(lora, tmp_path)
    lora.tensors["lm_head.lora_B"].fill_(1.0)
    assert not load_lora(model, CONFIG, tmp_path).tensors["lm_head.lora_B"].any()


def test_saved_optimizer_state_loads_with_the_same_bits(
    model: LanguageModel, tmp_path: Path
) -> None:
    trainer = Trainer(model, LoraWeights.initial(model, CONFIG))
    trainer.step = 7
    trainer.first_moments["lm_head.lora_A"].normal_()
    save_optimizer(trainer.optimizer_tensors(), tmp_path)
    other = Trainer(model, LoraWeights.initial(model, CONFIG))
    other.load_optimizer(load_optimizer(tmp_path))
    assert other.step == 7
    for name, tensor in trainer.optimizer_tensors().items():
        assert torch.equal(tensor, other.optimizer_tensors()[name])


def test_saved_folder_is_a_peft_adapter(model: LanguageModel, tmp_path: Path) -> None:
    save_lora(LoraWeights.initial(model, CONFIG), tmp_path)
    names = load_file(tmp_path / "adapter_model.safetensors")
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
    assert '"r": 4' in (tmp_path / "adapter_config.json").read_text()
    assert not list(tmp_path.glob(".*"))


def test_weights_of_another_model_are_refused(model: LanguageModel, tmp_path: Path) -> None:
    save_lora(LoraWeights.initial(model, CONFIG), tmp_path)
    with pytest.raises(RequestRefused, match=r"has the shape \(4, 32\), expected \(8, 32\)"):
        load_lora(model, LoraConfig(rank=8), tmp_path)


def test_missing_and_corrupt_files_are_named(model: LanguageModel, tmp_path: Path) -> None:
    with pytest.raises(RequestRefused, match=r"no optimizer.safetensors in"):
        load_optimizer(tmp_path)
    save_file({"x": torch.ones(100)}, tmp_path / "adapter_model.safetensors")
    whole = (tmp_path / "adapter_model.safetensors").read_bytes()
    (tmp_path / "adapter_model.safetensors").write_bytes(whole[:-10])
    with pytest.raises(RequestRefused, match="not a readable safetensors file"):
        load_lora(model, CONFIG, tmp_path)
