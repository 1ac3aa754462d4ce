"""Random base models that benchmarks measure with."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from benchmarks.engine.random_bases import SHAPES, write_base
from ratchet.engine.model.base_models import find
from ratchet.engine.model.language_model import LanguageModel


def test_the_engine_serves_a_random_base_and_its_tokenizer(tmp_path: Path) -> None:
    shape = Qwen3Config(
        vocab_size=2048,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
    )
    write_base(shape, tmp_path / "base")
    model = LanguageModel.load(find(str(tmp_path / "base")).folder)
    assert (model.vocab_size, model.cache_shape) == (2048, (2, 2, 16))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    assert tokenizer.decode(tokenizer.encode("a quiet otter")) == "a quiet otter"


def test_the_shape_of_qwen3_0_6b_has_as_many_weights_as_the_model() -> None:
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(SHAPES["qwen3-0.6b"])
    assert sum(weight.numel() for weight in network.parameters()) == 596_049_920
