"""`model.renderer: auto`: the renderer that writes as a model's own chat template does."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from adapters.rendering.chat import Chat
from adapters.rendering.fitting import choose_renderer, fitting_renderers
from adapters.rendering.renderer_names import TEMPLATE, NoRenderer, shorten_renderer

TINY = Path(__file__).parents[3] / "engine" / "tiny_chat"
PLAIN = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>bot\n{% endif %}"
)
"""A template in the tiny model's own marks that no named renderer writes."""


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(TINY)


def test_the_renderer_that_writes_as_the_template_does_is_chosen(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    assert fitting_renderers(tokenizer) == ["qwen3"]
    assert Chat(tokenizer).renderer == "qwen3"


def test_a_template_that_no_renderer_writes_is_rendered_itself(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer.chat_template = PLAIN
    chat = Chat(tokenizer)
    assert chat.renderer == shorten_renderer(TEMPLATE + PLAIN)
    asked = chat.render([{"role": "user", "content": "hi"}], [])
    assert chat.text(asked) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>bot\n"


def test_a_model_that_the_renderers_know_by_name_has_its_renderer(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer.name_or_path = "meta-llama/Llama-3.2-1B-Instruct"
    assert choose_renderer(tokenizer) == "llama-3"


def test_a_model_without_a_template_needs_a_renderer(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = None
    with pytest.raises(NoRenderer, match=r"tiny_chat has no chat template; give model\.renderer"):
        Chat(tokenizer)
    assert Chat(tokenizer, "qwen3").renderer == "qwen3"


def test_a_renderer_that_does_not_fit_is_refused_with_those_that_do(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    said = r"'llama-3' does not fit the model \(.*begin_of_text.*auto, or one that does: qwen3$"
    with pytest.raises(NoRenderer, match=said):
        Chat(tokenizer, "llama-3")
