from pathlib import Path

import pytest
import torch
from transformers import (
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from engine.errors import RequestRefused
from engine.model.attention import SequenceAttention, bucket
from engine.model.forward_pass import BasePass
from engine.model.language_model import LanguageModel

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


def packed_logits(model: LanguageModel, sequences: list[list[int]]) -> torch.Tensor:
    lengths = [len(sequence) for sequence in sequences]
    current = BasePass(SequenceAttention(lengths, model.device))
    tokens = torch.tensor([token for sequence in sequences for token in sequence])
    positions = torch.cat([torch.arange(length) for length in lengths])
    with torch.no_grad():
        return model.logits(tokens, positions, current)


@pytest.mark.parametrize(
    "config",
    [
        Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
        LlamaConfig(**SIZES),
        MistralConfig(**SIZES, sliding_window=5),
        Gemma2Config(**SIZES, head_dim=16, sliding_window=5, attn_logit_softcapping=3.0),
    ],
    ids=lambda config: config.model_type,
)
def test_packed_logits_equal_those_of_transformers(config: PreTrainedConfig) -> None:
    sequences = [[3, 7, 11] * 30, [5] * 9, [2, 4, 6, 8], [9]]
    plain = network(config)
    with torch.no_grad():
        expected = torch.cat([plain(torch.tensor([each])).logits[0] for each in sequences])
    found = packed_logits(LanguageModel(plain, "tiny"), sequences)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


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


def test_models_that_cannot_be_served_are_refused() -> None:
    with pytest.raises(RequestRefused, match="no linear layers in its attention"):
        LanguageModel(network(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2)), "gpt2")
    with pytest.raises(RequestRefused, match="s_aux"):
        LanguageModel(network(GptOssConfig(**SIZES, head_dim=16, rope_parameters=ROPE)), "oss")


ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def test_buckets_contain_their_lengths_and_waste_at_most_a_quarter() -> None:
    lengths = (1, 64, 65, 256, 257, 512, 513, 1000)
    assert [bucket(length) for length in lengths] == [64, 64, 128, 256, 320, 512, 640, 1024]
    for length in range(256, 5000):
        assert length <= bucket(length) < length * 1.25
