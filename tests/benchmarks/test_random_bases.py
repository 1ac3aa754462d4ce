"""Random base models that benchmarks measure with."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.engine.random_bases import SHAPES, write_base
from ratchet.engine.model.base_models import find
from ratchet.engine.model.language_model import LanguageModel
from tests.support.servers.engine_server import tiny_network


def test_the_engine_serves_a_random_base_and_its_tokenizer(tmp_path: Path) -> None:
    shape = tiny_network(vocab_size=2048, tie_word_embeddings=True).config
    write_base(shape, tmp_path / "base")
    model = LanguageModel.load(find(str(tmp_path / "base")).folder)
    assert (model.vocab_size, model.cache_shape) == (2048, (2, 1, 16))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    assert tokenizer.decode(tokenizer.encode("a quiet otter")) == "a quiet otter"


def test_the_shape_of_qwen3_0_6b_has_as_many_weights_as_the_model() -> None:
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(SHAPES["qwen3-0.6b"])
    assert sum(weight.numel() for weight in network.parameters()) == 596_049_920
