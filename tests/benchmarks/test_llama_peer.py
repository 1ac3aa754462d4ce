"""llama.cpp beside the engine: the same weights, and so the same probabilities and tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.engine.llama.process import PYTHON, Limits, Llama, start_llama
from benchmarks.engine.llama.weights import write_gguf
from ratchet.engine.model.base_models import TINY_CHAT, find
from ratchet.engine.model.language_model import LanguageModel
from ratchet.engine.sampling.requests import SampleRequest
from ratchet.engine.sampling.scheduler import Scheduler

PROMPTS = np.random.default_rng(0).integers(16, 1000, (3, 20)).tolist()
NEW_TOKENS = 16

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason=f"llama.cpp is not compiled: there is no {PYTHON}; run `make llama`"
)


@pytest.fixture(params=["Qwen3", "Llama"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "Qwen3":
        return find(TINY_CHAT).folder
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@contextmanager
def llama(folder: Path, tmp_path: Path) -> Iterator[Llama]:
    write_gguf(folder, tmp_path / "weights.gguf")
    limits = Limits(str(tmp_path / "weights.gguf"), 1, len(PROMPTS), len(PROMPTS[0]) + NEW_TOKENS)
    with start_llama(limits) as started:
        yield started


@contextmanager
def engine(folder: Path) -> Iterator[Scheduler]:
    scheduler = Scheduler(LanguageModel.load(folder))
    try:
        yield scheduler
    finally:
        scheduler.close()


def test_llama_cpp_gives_a_prompt_the_log_probabilities_that_the_engine_gives_it(
    folder: Path, tmp_path: Path
) -> None:
    asked = SampleRequest(PROMPTS[0], max_tokens=1, prompt_logprobs=True)
    with llama(folder, tmp_path) as peer, engine(folder) as scheduler:
        expected = scheduler.sample(asked, None).result().prompt_logprobs
        assert expected is not None
        assert peer.score(PROMPTS[0]) == pytest.approx(expected[1:].tolist(), abs=1e-4)


def test_llama_cpp_samples_other_tokens_for_the_same_prompt_in_another_row(
    folder: Path, tmp_path: Path
) -> None:
    with llama(folder, tmp_path) as peer:
        answers = peer.sample(PROMPTS[:1] * 3, NEW_TOKENS)
    assert {len(answer) for answer in answers} == {NEW_TOKENS}
    assert len({tuple(answer) for answer in answers}) == 3
