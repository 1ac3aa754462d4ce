"""The written-out layers, beside transformers' own of the same network."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import Ministral3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from ratchet.engine.model.base_models import TINY_CHAT, find
from ratchet.engine.model.language_model import LanguageModel
from ratchet.engine.sampling import decoder
from ratchet.engine.sampling.llama_layers import find_logits
from ratchet.engine.sampling.requests import SampleRequest
from tests.engine.test_architectures import SERVED, SIZES
from tests.engine.test_sampling import Asked, answer, answers, bits, changed_lora

COVERED = ("Llama", "Llama, tied", "Llama, biases", "Qwen2", "Qwen3, tied", "Mistral, window")
OTHERS = ("Gemma", "Gemma 2", "Gemma 3", "Mixtral", "Phi", "Phi 3", "OLMo 2", "Granite")
SMOLLM2: dict[str, Any] = {"hidden_size": 576, "intermediate_size": 1536, "head_dim": 64}
SMOLLM2 |= {"num_attention_heads": 9, "num_key_value_heads": 3}


def model_of(name: str, **changes: Any) -> LanguageModel:
    """Return a network of random weights; norms of ones would hide an operation left out."""
    config = type(SERVED[name])(**(SERVED[name].to_dict() | changes))
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for module in network.modules():
        if type(module).__name__.endswith("RMSNorm"):
            nn.init.normal_(module.weight, 1, 0.3)
    return LanguageModel(network.eval(), name)


def crowd(model: LanguageModel, number: int) -> list[Asked]:
    loras = [None, changed_lora(model, 4, seed=4), changed_lora(model, 8, seed=8, train_mlp=False)]
    lengths = (3, 65, 17)
    return [
        (
            SampleRequest(
                [(one * 7 + place) % model.vocab_size for place in range(lengths[one % 3])],
                max_tokens=12,
                seed=one,
                stop=[],
                prompt_logprobs=one % 2 == 0,
            ),
            loras[one % 3],
        )
        for one in range(number)
    ]


@pytest.mark.parametrize("name", ["tiny-chat", "Llama of SmolLM2's sizes", *COVERED])
def test_written_out_layers_sample_the_bits_of_transformers_layers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "tiny-chat":
        model = LanguageModel.load(find(TINY_CHAT).folder)
    else:
        model = model_of("Llama", **SMOLLM2) if name not in SERVED else model_of(name)
    assert find_logits(model) != model.logits
    asked = crowd(model, 16)
    alone = [bits(answer(model, *each)) for each in asked[:3]]
    ours = {number: [*map(bits, answers(model, asked[:number]))] for number in (1, 3, 16)}
    assert ours[16][:3] == ours[3] == alone
    assert ours[1] == alone[:1]
    monkeypatch.setattr(decoder, "find_logits", lambda model: model.logits)
    for number, found in ours.items():
        assert [*map(bits, answers(model, asked[:number]))] == found


@pytest.mark.parametrize("name", OTHERS)
def test_a_network_of_other_parts_or_results_is_computed_by_transformers(name: str) -> None:
    model = model_of(name)
    assert find_logits(model) == model.logits


def test_a_network_whose_queries_change_far_from_the_start_is_computed_by_transformers() -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1}
    rope["original_max_position_embeddings"] = 128
    config = Ministral3Config(**SIZES, head_dim=16, rope_parameters=rope)
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = LanguageModel(network.eval(), "Ministral 3")
    assert find_logits(model) == model.logits
