from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel, Qwen3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from ratchet.engine.model.attention import bucket
from ratchet.engine.model.language_model import LanguageModel

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "eos_token_id": 1,
    "bos_token_id": 0,
}


def network(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def test_loading_a_folder_reads_context_vocabulary_and_end_tokens(tmp_path: Path) -> None:
    original = network(Qwen3Config(**SIZES, head_dim=16))
    original.save_pretrained(tmp_path)
    model = LanguageModel.load(tmp_path)
    assert (model.vocab_size, model.max_context, model.end_tokens) == (64, 256, [1])
    assert model.cache_shape == (2, 2, 16)
    assert not any(weight.requires_grad for weight in model.network.parameters())


def test_every_linear_layer_has_a_kind() -> None:
    model = LanguageModel(network(Qwen3Config(**SIZES, head_dim=16)), "tiny")
    kinds = {name.rpartition(".")[2]: layer.kind for name, layer in model.linears.items()}
    assert kinds == {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "attention"),
        **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp"),
        "lm_head": "unembedding",
    }


def test_buckets_contain_their_lengths_and_waste_at_most_a_quarter() -> None:
    lengths = (1, 64, 65, 256, 257, 512, 513, 1000)
    assert [bucket(length) for length in lengths] == [64, 64, 128, 256, 320, 512, 640, 1024]
    for length in range(256, 5000):
        assert length <= bucket(length) < length * 1.25
