"""A small random Llama as a GGUF file, with the tiny model's tokenizer."""

import json
from pathlib import Path
from typing import Any

import torch
from gguf import MODEL_ARCH, GGUFWriter, get_tensor_name_map
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

TINY = Path(__file__).parents[2] / "engine" / "tiny_chat"
NORMAL, CONTROL = 1, 3
"""Types of tokens in a GGUF file."""


def write_gguf(
    file: Path, *, tokenizer: bool = True, template: bool = True
) -> tuple[Path, PreTrainedModel]:
    """Write a random model of two layers; return the file and the model itself."""
    read = json.loads((TINY / "tokenizer.json").read_text())
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(_vocabulary(read)),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    network = LlamaForCausalLM(config).eval()
    writer = GGUFWriter(file, "llama")
    writer.add_license("apache-2.0")
    writer.add_context_length(512)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_block_count(2)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    if tokenizer:
        _add_tokenizer(writer, read)
    if template:
        writer.add_chat_template((TINY / "chat_template.jinja").read_text())
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, 2)
    for name, weights in network.state_dict().items():
        named = names.get_name(name, try_suffixes=(".weight",))
        assert named is not None
        writer.add_tensor(named, _gguf_order(name, weights).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file, network


def _vocabulary(tokenizer: dict[str, Any]) -> dict[str, int]:
    return tokenizer["model"]["vocab"] | {
        token["content"]: token["id"] for token in tokenizer["added_tokens"]
    }


def _add_tokenizer(writer: GGUFWriter, tokenizer: dict[str, Any]) -> None:
    vocabulary = _vocabulary(tokenizer)
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    special = {token["content"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if token in special else NORMAL for token in tokens])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    writer.add_eos_token_id(vocabulary["<|im_end|>"])


def _gguf_order(name: str, weights: torch.Tensor) -> torch.Tensor:
    """Return queries and keys with their rotary halves interleaved, as llama.cpp keeps them."""
    heads = {"q_proj": 4, "k_proj": 2}
    part = next((heads[part] for part in heads if part in name), None)
    if part is None:
        return weights.contiguous()
    halves = weights.view(part, 2, weights.shape[0] // part // 2, weights.shape[1])
    return halves.transpose(1, 2).reshape(weights.shape).contiguous()
