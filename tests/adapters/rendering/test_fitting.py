"""`model.renderer: auto`: the renderer that writes as a model's own chat template does."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from transformers import AddedToken, AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from ratchet.adapters.calls import Message, Refused
from ratchet.adapters.rendering.chat import Chat
from ratchet.adapters.rendering.marks import CALL, LOOK, RESULT
from ratchet.adapters.rendering.renderer_names import TEMPLATE, NoRenderer, shorten_renderer
from ratchet.adapters.rendering.renderers import choose_renderer, fitting_renderers

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


@pytest.mark.parametrize("form", [dict, list], ids=["by name", "as published"])
def test_the_default_of_several_named_templates_is_the_model_s(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, form: type
) -> None:
    own = str(tokenizer.chat_template)
    tokenizer.chat_template = {"default": own, "rag": PLAIN}
    if form is list:
        tokenizer.save_pretrained(tmp_path)
        for file in [*tmp_path.glob("*.jinja"), *tmp_path.glob("additional_chat_templates/*")]:
            file.unlink()
        config = tmp_path / "tokenizer_config.json"
        named = [{"name": "default", "template": own}, {"name": "rag", "template": PLAIN}]
        config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": named}))
        tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert Chat(tokenizer).renderer == "qwen3"


def test_a_template_for_tools_is_taken_where_tools_are_offered(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    by_name = {"default": PLAIN, "tool_use": "{{ tools | tojson }}\n" + PLAIN}
    tokenizer.chat_template = by_name
    chat = Chat(tokenizer)
    asked: Any = [{"role": "user", "content": "hi"}]
    for tools in ([], [LOOK]):
        offered: Any = tools or None
        own = tokenizer.apply_chat_template(
            asked, tools=offered, add_generation_prompt=True, tokenize=False
        )
        assert chat.text(chat.render(asked, tools)) == own


def test_named_templates_without_a_default_are_refused_by_their_names(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer.chat_template = {"rag": PLAIN, "tool_use": PLAIN}
    with pytest.raises(NoRenderer, match="template, only ones named 'rag', 'tool_use'; give"):
        Chat(tokenizer)


def test_a_tokenizer_that_is_written_in_python_opens() -> None:
    shas = set()
    for marks in (["<|im_start|>", "<|im_end|>"], ["<|im_start|>", "<|im_end|>", "<more>"]):
        tokenizer = ByT5Tokenizer()
        for mark in marks:
            tokenizer.add_tokens(AddedToken(mark, special=True))
        tokenizer.chat_template = PLAIN
        chat = Chat(tokenizer)
        prompt = chat.render([{"role": "user", "content": "h\u00e9"}], [])
        assert chat.text(prompt) == "<|im_start|>user\nh\u00e9<|im_end|>\n<|im_start|>bot\n"
        said = [*chat.encode("Hi"), chat.stop_tokens[0]]
        assert chat.parse(said, with_tools=False)["content"] == "Hi"
        shas.add(chat.tokenizer_sha)
    assert len(shas) == 2


def test_a_renderer_that_does_not_fit_is_refused_with_those_that_do(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    said = r"'llama-3' does not fit the model \(.*begin_of_text.*auto, or one that does: qwen3$"
    with pytest.raises(NoRenderer, match=said):
        Chat(tokenizer, "llama-3")


def test_tools_are_offered_by_a_model_without_tokens_for_calls_and_whose_end_is_unknown(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    written = json.loads(tokenizer.backend_tokenizer.to_str())
    words = [
        one["content"] for one in written["added_tokens"] if not one["content"].startswith("<|")
    ]
    assert "<tool_call>" in words
    written["added_tokens"] = [
        one for one in written["added_tokens"] if one["content"] not in words
    ]
    for word in words:
        written["model"]["vocab"].pop(word, None)
    end = "<|endoftext|>"
    backend = Backend.from_str(json.dumps(written))
    plain = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=end, eos_token="<|im_end|>")
    plain.chat_template = PLAIN
    asked: list[Message] = [{"role": "user", "content": "Where?"}]
    with pytest.raises(Refused, match=r"leaves out the tool look; give another .* such as qwen3"):
        Chat(plain).render(asked, [LOOK])
    chat, whole = Chat(plain, "qwen3"), Chat(tokenizer, "qwen3")
    prompt = chat.render(asked, [LOOK])
    assert chat.text(prompt) == whole.text(whole.render(asked, [LOOK]))
    answer: Message = {"role": "assistant", "content": " I look.", "tool_calls": [CALL]}
    said = chat.answer(asked, answer, [LOOK])
    assert chat.text(said) == whole.text(whole.answer(asked, answer, [LOOK]))
    message = chat.parse(said, with_tools=True, prompt=prompt, tools=[LOOK])
    [call] = message.get("tool_calls") or []
    assert [message["content"], call["function"]] == [" I look.", CALL["function"]]
    following = chat.extend(prompt, said, [RESULT], [LOOK]) or []
    assert following[: len(prompt) + len(said)] == [*prompt, *said]
    assert "<tool_response>\na cat\n</tool_response>" in chat.text(following)
    assert max(*prompt, *said, *following) < len(plain)
    assert chat.parse(chat.encode("<tool_call>{"), with_tools=True)["content"] == "<tool_call>{"
    with pytest.raises(NoRenderer, match="begin_of_text"):
        Chat(plain, "llama-3")
