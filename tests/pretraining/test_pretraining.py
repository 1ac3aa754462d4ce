import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from renderers.configs import Qwen3RendererConfig
from renderers.qwen3 import Qwen3Renderer
from transformers import Qwen3ForCausalLM

from pretraining import tokenizer as tokenizers
from pretraining.corpora.mixture import examined_corpora, stream
from pretraining.corpora.tool_calls import TOOLS
from pretraining.durable_tasks import TokenBudget
from pretraining.flow import pretrain
from pretraining.training_loop import Shape, TrainingState, new_model, train

pytestmark = pytest.mark.story

pytest.importorskip("gem", reason="GEM is not installed: pip install gem-llm==0.1.0")

SHIPPED = Path(__file__).parents[2] / "engine" / "tiny_chat"
SMALL = Shape(hidden=32, layers=1)


@pytest.fixture(scope="module")
def tokenizer():
    texts = [m["content"] for c in islice(stream("t", 0.5), 300) for m in c.messages]
    return tokenizers.train_tokenizer(texts, 400)


@pytest.fixture(scope="module")
def shipped():
    return tokenizers.load_tokenizer(SHIPPED)


def render_equally(tokenizer, messages, tools) -> bool:
    """Return True if template and renderer give the same tokens, with and without an opening."""
    renderer = Qwen3Renderer(tokenizer, Qwen3RendererConfig())
    return all(
        renderer.render_ids(messages, tools=tools or None, add_generation_prompt=generates)
        == tokenizer.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=generates
        )["input_ids"]
        for generates in (False, True)
    )


def test_chat_template_equals_the_qwen3_renderer(shipped) -> None:
    for conversation in islice(stream("render", 0.5), 200):
        for length in range(1, len(conversation.messages) + 1):
            assert render_equally(shipped, conversation.messages[:length], conversation.tools)


def test_tool_calls_thoughts_and_unicode_render_equally(shipped) -> None:
    calls = [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "é<"}}},
        {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
    ]
    messages = [
        {"role": "system", "content": "Être bref."},
        {"role": "user", "content": "\nhi 12"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "<think>\nx y\n</think>\n\nSeven"},
        {"role": "user", "content": "ok"},
        {"role": "assistant", "content": "abc", "tool_calls": calls[:1]},
    ]
    for length in range(1, len(messages) + 1):
        for tools in ([], [TOOLS["add"]]):
            assert render_equally(shipped, messages[:length], tools)


@given(text=st.text(max_size=40))
def test_tokenizer_decodes_any_text_unchanged(shipped, text: str) -> None:
    ids = shipped.encode(text, add_special_tokens=False)
    assert shipped.decode(ids) == text


def test_answers_are_trained_to_their_end_token_and_ignored_answers_are_not(tokenizer) -> None:
    said = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    messages = [{"role": role, "content": content} for role, content in said]
    ids, weights = tokenizers.Encoder(tokenizer, prompt_weight=0.5).encode(
        messages, [], ignored={1}
    )
    pieces = [tokenizer.decode([token]) for token in ids]
    assert [piece for piece, weight in zip(pieces, weights, strict=True) if weight == 0.0] == [
        "b",
        "<|im_end|>",
    ]
    assert [piece for piece, weight in zip(pieces, weights, strict=True) if weight == 1.0] == [
        "d",
        "<|im_end|>",
    ]
    assert set(weights) == {0.0, 0.5, 1.0}


def documents(seed: str) -> Iterator[tuple[list[int], list[float]]]:
    """Yield documents that count from a random number."""
    rng = Random(seed)
    while True:
        first = rng.randrange(1, 300)
        yield list(range(first, first + 40)), [1.0] * 40


def losses_of(state: TrainingState, seed: str, until: int) -> list[float]:
    """Train and return the reported losses."""
    reports = train(state, documents(seed), tokens=160_000, until=until, seed=seed)
    return [progress["loss"] for progress in reports]


def test_training_lowers_the_loss(tokenizer) -> None:
    losses = losses_of(TrainingState(new_model(SMALL, tokenizer, seed=0)), "count", 160_000)
    assert losses[-1] < losses[0]


def test_saved_training_state_continues_with_the_same_bits(tokenizer, tmp_path: Path) -> None:
    one = TrainingState(new_model(SMALL, tokenizer, seed=0))
    losses_of(one, "first", 20_000)
    one.save(tmp_path / "half")
    other = TrainingState.load(tmp_path / "half")
    for state in (one, other):
        losses_of(state, "second", 40_000)
    for first, second in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(first, second)
    assert (one.steps, one.read) == (other.steps, other.read)


def test_shipped_model_is_small_and_has_the_right_end_token(shipped) -> None:
    config = json.loads((SHIPPED / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == "qwen3"
    assert config["eos_token_id"] == shipped.convert_tokens_to_ids("<|im_end|>")
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) < 8_000_000


@pytest.mark.usefixtures("prefect_server")
def test_pretraining_builds_a_small_model_and_reuses_complete_parts(tmp_path: Path) -> None:
    def run() -> Path:
        budget = TokenBudget(clean=9_000, sharp=4_500, noisy=4_500, parts=2)
        return pretrain(tmp_path, shape=SMALL, budget=budget, games=2)

    shipped = run()
    scores = json.loads((tmp_path / "scores-shipped.json").read_text(encoding="utf-8"))
    assert scores["games"] == 2
    assert list(scores["scores"]) == list(examined_corpora())
    card = (shipped / "README.md").read_text(encoding="utf-8")
    parameters = Qwen3ForCausalLM.from_pretrained(shipped).num_parameters()
    assert f"A language model of {parameters:,} parameters" in card
    assert "over 2 held-out games" in card
    for name, score in scores["scores"].items():
        assert re.search(rf"\| {name} \|.* {score['mean']:.2f} ± {score['error']:.2f} \|\n", card)
    written = (shipped / "model.safetensors").stat().st_mtime_ns
    assert run() == shipped
    assert (shipped / "model.safetensors").stat().st_mtime_ns == written
