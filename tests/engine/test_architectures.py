"""Every architecture that is served, on random weights beside transformers."""

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch.func import functional_call
from transformers import (
    BloomConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
    Starcoder2Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from ratchet.engine.errors import RequestRefused
from ratchet.engine.model.language_model import LanguageModel
from ratchet.engine.model.lora import LoraWeights
from ratchet.engine.sampling.requests import SampleRequest
from ratchet.engine.training.losses import TrainingDatum
from ratchet.engine.training.trainer import Trainer
from tests.engine.test_sampling import answers, changed_lora

ROPE: Any = {"rope_type": "default", "rope_theta": 10000.0}
SIZES: dict[str, Any] = {
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
    "pad_token_id": None,
}
WINDOW: dict[str, Any] = {"sliding_window": 40}
SERVED: dict[str, PreTrainedConfig] = {
    "Llama": LlamaConfig(**SIZES),
    "Llama, tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "Llama, biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "Qwen2": Qwen2Config(**SIZES),
    "Qwen3": Qwen3Config(**SIZES, head_dim=16),
    "Qwen3, tied": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "Gemma": GemmaConfig(**SIZES, head_dim=16),
    "Gemma 2": Gemma2Config(**SIZES, **WINDOW, head_dim=16, attn_logit_softcapping=3.0),
    "Gemma 3": Gemma3TextConfig(**SIZES, **WINDOW, head_dim=16),
    "Mistral": MistralConfig(**SIZES),
    "Mistral, window": MistralConfig(**SIZES, **WINDOW),
    "Mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "Phi": PhiConfig(**SIZES),
    "Phi 3": Phi3Config(**SIZES),
    "SmolLM3": SmolLM3Config(**SIZES),
    "OLMo 2": Olmo2Config(**SIZES),
    "Granite": GraniteConfig(**SIZES, embedding_multiplier=2.0, logits_scaling=3.0),
    "StarCoder 2": Starcoder2Config(**SIZES),
}
REFUSED: dict[str, tuple[PreTrainedConfig, str]] = {
    "GPT-2": (
        GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2),
        "GPT2LMHeadModel has no linear layers in its attention",
    ),
    "GPT-OSS": (
        GptOssConfig(**SIZES, head_dim=16, rope_parameters=ROPE),
        "GptOssAttention needs attention with .*s_aux",
    ),
    "BLOOM": (
        BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2),
        "BloomForCausalLM. does not take",
    ),
    "Mamba": (
        MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1),
        "MambaForCausalLM has no",
    ),
}


def network(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    own = deepcopy(config)
    made = AutoModelForCausalLM.from_config(own, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 1:  # norms begin as 1 and biases as 0, which tests nothing
                parameter += torch.randn_like(parameter) * 0.1
    return made


def with_lora(plain: PreTrainedModel, lora: LoraWeights, tokens: list[int]) -> torch.Tensor:
    """Return transformers' logits of the network whose layers have the LoRA added."""
    added = {
        f"{layer}.weight": plain.get_parameter(f"{layer}.weight") + lora.config.scale * (b @ a)
        for layer, (a, b) in lora.pairs.items()
    }
    asked = (torch.tensor([tokens]),)
    # Untied, because a LoRA of a tied head leaves the embedding as it is.
    outputs = functional_call(plain, added, asked, {"use_cache": False}, tie_weights=False)
    return outputs.logits[0]


@pytest.mark.parametrize("name", SERVED)
def test_log_probabilities_and_gradients_are_those_of_transformers(name: str) -> None:
    plain, model = network(SERVED[name]), LanguageModel(network(SERVED[name]), name)
    trainer = Trainer(model, changed_lora(model))
    begun = [3, 7, 11, 19] * 18
    answered = [*begun, *[9, 2] * 33]
    shared = [[*answered, 4, 6], [*answered, 8], [*begun, 5, 1, 5]]
    sequences = [*shared, [5] * 9, [2, 4, 6, 8]]  # the first three form a tree of two levels
    expected = []
    for tokens in sequences:
        logits = with_lora(plain, trainer.lora, tokens[:-1])
        picked = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        expected.append(picked)
    gradients = torch.autograd.grad(-torch.cat(expected).sum(), [*trainer.lora.tensors.values()])
    datums = [TrainingDatum(one[:-1], {"target_tokens": np.array(one[1:])}) for one in sequences]
    found, _ = trainer.forward_backward(datums, "cross_entropy")
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs.detach(), atol=1e-4, rtol=1e-4)
    for tensor, theirs in zip(trainer.lora.tensors, gradients, strict=True):
        grad = trainer.sums.total()[tensor]
        torch.testing.assert_close(grad, theirs, atol=2e-3, rtol=1e-3, msg=tensor)


@pytest.mark.parametrize("name", SERVED)
def test_greedy_answers_are_those_of_transformers(name: str) -> None:
    plain, model = network(SERVED[name]), LanguageModel(network(SERVED[name]), name)
    lora = changed_lora(model)
    prompts = [[3, 7, 11] * 22, [3, 7, 11] * 30, [5]]
    requests = [SampleRequest(one, max_tokens=60, stop=[], temperature=0.0) for one in prompts]
    found = answers(model, [(request, lora) for request in requests])
    for prompt, result in zip(prompts, found, strict=True):
        drawn = result.sequences[0]
        with torch.no_grad():
            logits = with_lora(plain, lora, [*prompt, *drawn.tokens])[len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == drawn.tokens
        known = logits.log_softmax(-1).max(-1).values
        np.testing.assert_allclose(drawn.logprobs, known, atol=1e-4)


@pytest.mark.parametrize(("config", "reason"), REFUSED.values(), ids=REFUSED)
def test_other_architectures_are_refused_by_name(config: PreTrainedConfig, reason: str) -> None:
    with pytest.raises(RequestRefused, match=reason):
        LanguageModel(network(config), "other")
