"""A recipe's own chat template: what it renders, where answers end, and how it continues."""

from pathlib import Path

import pytest
from pydantic import ValidationError
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ratchet.adapters.calls import Message, Refused, Tool
from ratchet.adapters.door.role_calls import KeptCalls
from ratchet.adapters.errors import UserError
from ratchet.adapters.rendering.chat import Chat
from ratchet.adapters.rendering.renderer_names import TEMPLATE
from tests.support.door.answered_call import answered_call
from tests.support.runs.small_recipe import small_recipe

TINY = Path(__file__).parents[3] / "engine" / "tiny_chat"
ASKED: list[Message] = [{"role": "user", "content": "hello"}]
MORE: list[Message] = [{"role": "user", "content": "and?"}]
FOREIGN = (
    "{{- bos_token }}{% for message in messages %}"
    "{{- '<|start|>' + message['role'] + '<|end|>' + message['content'] | trim + '<|eot|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{- '<|start|>assistant<|end|>' }}{% endif %}"
)
"""A template with the marks of another model, which the tiny tokenizer does not know."""

DATED = "{{ strftime_now('%Y') if strftime_now is defined else 'no date' }}" + FOREIGN
NUMBERED = FOREIGN.replace("{{- '<|start|>'", "{{- messages | length ~ '<|start|>'")
"""A template in which what follows an answer depends on the messages before it."""


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(TINY)


def chat_of(tokenizer: PreTrainedTokenizerFast, template: str) -> Chat:
    return Chat(tokenizer, TEMPLATE + template)


def test_a_model_s_own_template_renders_as_its_renderer_does(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    own, named = chat_of(tokenizer, str(tokenizer.chat_template)), Chat(tokenizer)
    assert own.stop_tokens[0] == named.stop_tokens[0]
    assert own.render(ASKED, []) == named.render(ASKED, [])
    for said in ([*named.encode("Hi"), named.stop_tokens[0]], named.encode("Hi th")):
        prompt = named.render(ASKED, [])
        assert own.extend(prompt, said, MORE, []) == named.extend(prompt, said, MORE, [])


def test_another_model_s_template_keeps_the_tokens_of_a_growing_conversation(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    chat = chat_of(tokenizer, FOREIGN)
    assert chat.stop_tokens == [tokenizer.eos_token_id]
    prompt = chat.render(ASKED, [])
    assert chat.text(prompt) == "<|start|>user<|end|>hello<|eot|><|start|>assistant<|end|>"
    for said in ([*chat.encode(" Hi "), chat.stop_tokens[0]], chat.encode(" Hi th")):
        continued = chat.extend(prompt, said, MORE, []) or []
        assert continued[: len(prompt) + len(said)] == [*prompt, *said]
        following = "<|eot|><|start|>user<|end|>and?<|eot|><|start|>assistant<|end|>"
        assert chat.text(continued[len(prompt) + len(said) :]) == following


def test_a_conversation_that_a_template_cannot_continue_is_told(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    reply: Message = {"role": "assistant", "content": "Hi"}
    for template, how in ((FOREIGN, "messages"), (NUMBERED, "unbridged")):
        chat = chat_of(tokenizer, template)
        kept, prompt = KeptCalls(chat), chat.render(ASKED, [])
        kept.remember(answered_call(ASKED, [], reply, prompt, chat.encode("Hi")))
        assert kept.prompt([*ASKED, reply, *MORE], []).how == how


def test_a_template_may_be_the_last_message_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    """As the example of GEM has it with `template` no: docs/algorithms.md."""
    chat = chat_of(tokenizer, "{{ messages[-1].content }}")
    assert chat.text(chat.render(MORE, [])) == MORE[-1]["content"]
    with pytest.raises(Refused, match=r"leaves out the text of a message of the role user \(hello"):
        chat.render([*ASKED, *MORE], [])


def test_a_template_is_told_no_date(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = chat_of(tokenizer, DATED)
    assert chat.text(chat.render(ASKED, [])).startswith("no date<|start|>")


def test_an_answer_s_reasoning_is_parsed_and_its_tool_calls_stay_text(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    chat = chat_of(tokenizer, FOREIGN)
    answer = [*chat.encode("<think>so</think>yes"), chat.stop_tokens[0]]
    assert chat.parse(answer, with_tools=True) == {
        "role": "assistant",
        "content": "yes",
        "reasoning_content": "so",
    }
    call = '{"name": "look", "arguments": {}}'
    assert chat.parse(chat.encode(call), with_tools=True) == {"role": "assistant", "content": call}


def test_tools_are_given_to_the_template(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = chat_of(tokenizer, "{{ tools | tojson if tools else '' }}" + FOREIGN)
    tool: Tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    assert '"name": "look"' in chat.text(chat.render(ASKED, [tool]))


@pytest.mark.parametrize("template", ["{% for %}", "{{ raise_exception('never') }}", "{{ 1 / 0 }}"])
def test_a_template_that_renders_nothing_is_refused(
    tokenizer: PreTrainedTokenizerFast, template: str
) -> None:
    with pytest.raises(UserError, match=r"cannot be rendered .*; mend it, or give"):
        chat_of(tokenizer, template)


def test_a_recipe_holds_the_text_of_its_template(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(FOREIGN)
    recipe = small_recipe(model={"renderer": f"jinja:{file}"})
    assert recipe.model.renderer == TEMPLATE + FOREIGN
    file.write_text(DATED)
    assert small_recipe(**recipe.model_dump()) == recipe
    assert small_recipe(model={"renderer": f"jinja:{file}"}).fingerprint() != recipe.fingerprint()
    with pytest.raises(ValidationError, match=r"'gone\.jinja' is neither a file nor a Jinja temp"):
        small_recipe(model={"renderer": "jinja:gone.jinja"})


def test_a_span_names_a_template_by_its_contents(tokenizer: PreTrainedTokenizerFast) -> None:
    names = {chat_of(tokenizer, template).renderer for template in (FOREIGN, DATED)}
    assert len(names) == 2
    assert all(len(name) == len(TEMPLATE) + 16 for name in names)
