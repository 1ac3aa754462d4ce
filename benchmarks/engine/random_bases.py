"""Base models of random weights: as fast as real ones of their shape, and fetched from nowhere.

python -m benchmarks.engine.random_bases qwen3-0.6b FOLDER
"""

import argparse
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config

from ratchet.engine.model.base_models import TINY_CHAT, find

SHAPES: dict[str, PreTrainedConfig] = {
    "qwen3-0.6b": Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    "smollm2-135m": LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
    ),
}


def write_base(shape: PreTrainedConfig, folder: Path) -> None:
    """Write a base model into a folder, in bfloat16 and with the tokenizer of the tiny model.

    The tokenizer knows only the first of the tokens.
    """
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).save_pretrained(folder)
    for pattern in ("tokenizer*", "chat_template*"):
        for file in find(TINY_CHAT).folder.glob(pattern):
            shutil.copy(file, folder)


def main() -> None:
    """Write a base model from the command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("shape", choices=SHAPES)
    options.add_argument("folder", type=Path)
    arguments = options.parse_args()
    write_base(SHAPES[arguments.shape], arguments.folder)


if __name__ == "__main__":
    main()
