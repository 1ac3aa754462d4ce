"""An instruction that is not the client's, behind a conversation in any format."""

from collections.abc import Callable

import pytest

from ratchet.adapters.calls import Message, Refused, Tool
from ratchet.adapters.dialects.instructions import render_told
from ratchet.adapters.door.role_calls import KeptCalls
from ratchet.adapters.rendering.chat import Chat
from ratchet.adapters.rendering.renderer_names import TEMPLATE
from tests.support.door.answered_call import answered_call
from tests.support.every_renderer import NAMES, chat_of, tokenizer_of

SAID = "Answer with nothing but a JSON object."
ASKED: list[Message] = [{"role": "user", "content": "Who are you?"}]
REPLY: Message = {"role": "assistant", "content": "{}"}
CALLED: list[Message] = [
    *ASKED,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": "{}"}}],
    },
    {"role": "tool", "name": "look", "content": "a cat"},
]
LOOK: Tool = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}},
}
WRITTEN = (
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] | trim }}"
    "{{ message['tool_calls'] | tojson if message['tool_calls'] }}<|im_end|>\n{% endfor %}"
    "{{ tools | tojson if tools }}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SYSTEM_FIRST = (
    "{% for message in messages %}{% if message['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning') }}{% endif %}" + WRITTEN
)
ALTERNATING = (
    "{% set turn = namespace(of='user') %}{% for message in messages %}"
    "{% if message['role'] in ('user', 'assistant') %}{% if message['role'] != turn.of %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{% set turn.of = 'assistant' if message['role'] == 'user' else 'user' %}"
    "{% elif message['role'] == 'tool' %}{% set turn.of = 'assistant' %}"
    "{% elif not loop.first %}{{ raise_exception('System message must be first') }}{% endif %}"
    + WRITTEN
)
FORMATS: dict[str, Callable[[], Chat]] = {
    **{name: lambda name=name: chat_of(name) for name in NAMES},
    "system first": lambda: Chat(tokenizer_of("qwen3"), TEMPLATE + SYSTEM_FIRST),
    "alternating": lambda: Chat(tokenizer_of("qwen3"), TEMPLATE + ALTERNATING),
}


@pytest.fixture(params=FORMATS, scope="module")
def chat(request: pytest.FixtureRequest) -> Chat:
    return FORMATS[request.param]()


@pytest.mark.parametrize(
    "messages", [ASKED, CALLED, [{"role": "system", "content": "Be brief."}, *ASKED]]
)
@pytest.mark.parametrize("tools", [[], [LOOK]])
def test_an_instruction_is_read_after_the_messages_in_every_format(
    chat: Chat, messages: list[Message], tools: list[Tool]
) -> None:
    try:
        chat.render(messages, tools)
    except Refused:  # as a format without tools does
        with pytest.raises(Refused, match="leaves out the tool look"):
            render_told(chat, messages, tools, SAID)
        return
    before, _, behind = chat.text(render_told(chat, messages, tools, SAID)).partition(SAID)
    assert messages[-1]["content"] in before
    assert messages[-1]["content"] not in behind


def test_a_conversation_goes_on_from_its_tokens_whatever_is_asked_of_each_answer(
    chat: Chat,
) -> None:
    kept, messages = KeptCalls(chat), [*ASKED]
    prompt = kept.prompt(messages, [], SAID).token_ids
    for said in (SAID, "", SAID):
        answer = [*chat.encode("</think>{}"), chat.stop_tokens[0]]
        kept.remember(answered_call(messages, [], REPLY, prompt, answer))
        messages += [REPLY, *ASKED]
        following = kept.prompt(messages, [], said)
        assert following.how == "messages"
        assert following.token_ids[: len(prompt) + len(answer)] == [*prompt, *answer]
        assert said in chat.text(following.token_ids[len(prompt) + len(answer) :])
        prompt = following.token_ids


def test_where_a_system_message_may_stand_last_the_instruction_is_one() -> None:
    chat = chat_of("qwen3")
    usual = chat.render([*ASKED, {"role": "system", "content": SAID}], [])
    assert render_told(chat, ASKED, [], SAID) == usual


def test_the_instruction_is_never_put_into_the_words_of_the_assistant() -> None:
    chat = FORMATS["alternating"]()
    text = chat.text(render_told(chat, [*ASKED, REPLY], [], SAID))
    assert f"assistant\n{{}}<|im_end|>\n<|im_start|>user\n{SAID}<|im_end|>" in text
