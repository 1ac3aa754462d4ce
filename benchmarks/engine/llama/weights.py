"""A model's folder as a GGUF file of the same weights in float32, without its tokenizer."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGUFWriter, get_tensor_name_map
from safetensors import safe_open

ARCHITECTURES = {"llama": MODEL_ARCH.LLAMA, "qwen3": MODEL_ARCH.QWEN3}
"""Architectures by the name that a model's config gives them."""

INTERLEAVED = "llama"
"""The architecture whose queries and keys llama.cpp keeps with their rotary halves interleaved."""


def write_gguf(folder: Path, file: Path) -> None:
    """Write the weights and the shape of a model, for programs that ask by tokens."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = config["model_type"]
    if kind not in ARCHITECTURES:
        raise SystemExit(
            f"{folder} has the architecture {kind!r}; give {' or '.join(ARCHITECTURES)}"
        )
    writer = GGUFWriter(file, MODEL_ARCH_NAMES[ARCHITECTURES[kind]])
    _add_shape(writer, config)
    names = get_tensor_name_map(ARCHITECTURES[kind], config["num_hidden_layers"])
    for name, weights in _read_weights(folder):
        named = names.get_name(name, try_suffixes=(".weight",))
        assert named is not None, f"GGUF has no name for {name}"
        if kind == INTERLEAVED and ("q_proj" in name or "k_proj" in name):
            weights = _interleave(weights, config["head_dim"])
        writer.add_tensor(named, weights.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_shape(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])


def _read_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - an opened file is no dictionary
                yield name, opened.get_tensor(name).float()


def _interleave(weights: torch.Tensor, width: int) -> torch.Tensor:
    """Put the two rotary halves of each head, which has `width` rows, in turns."""
    halves = weights.view(-1, 2, width // 2, weights.shape[1])
    return halves.transpose(1, 2).reshape(weights.shape).contiguous()
