"""Each renderer with each part of a conversation: it trains right, or a sentence refuses it."""

import json
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from ratchet.adapters.calls import Message, Refused
from ratchet.adapters.rendering.chat import Chat
from ratchet.adapters.rendering.marks import CALL, LOOK
from ratchet.adapters.rendering.messages import read_call, read_message, read_tool
from ratchet.adapters.rendering.renderer_names import TEMPLATE, NoRenderer
from ratchet.tasks.given.conversations import tokenize
from tests.support.every_renderer import NAMES, TINY, chat_of, tokenizer_of
from tests.support.renderer_table import COLUMNS, try_cell, write_table

PAGE = Path(__file__).parents[3] / "docs" / "methods.md"
ASKED: list[Message] = [{"role": "user", "content": "Who are you?"}]
OWL: Message = {"role": "assistant", "content": "I am an owl."}
WITHOUT_SWITCH = (
    "deepseek-r1",
    "deepseek-v3",
    "glm-5.3",
    "kimi-k2",
    "llama-3",
    "minimax-m2",
    "prime-qwen3",
    "qwen3-vl",
)
SILENT = (
    "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
)
"""A template that leaves out system messages."""

STRIPPING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that strips texts."""

SWITCHING = SILENT + "{{ '<think>' if enable_thinking else '' }}"


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("renderer", NAMES)
def test_a_renderer_trains_right_or_refuses_in_a_sentence(renderer: str, column: str) -> None:
    assert try_cell(renderer, column)


def test_the_page_has_the_table_of_renderers() -> None:
    assert write_table() in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("renderer", ["nemotron-3", "glm-5", "minimax-m2", "deepseek-r1"])
def test_a_plain_answer_is_trained_behind_an_empty_thought(renderer: str) -> None:
    chat = chat_of(renderer)
    assert chat.text(chat.render(ASKED, [])).rstrip().endswith("<think>")
    before, closed, said = chat.text(chat.answer(ASKED, OWL, [])).partition("</think>")
    assert (before.strip(), closed) == ("", "</think>")
    assert said.lstrip().startswith("I am an owl.")


def test_kimi_s_reasoning_is_trained_before_its_answer() -> None:
    chat = chat_of("kimi-k2.5")
    answer: Message = {**OWL, "reasoning_content": "I was told."}
    assert chat.text(chat.answer(ASKED, answer, [])) == "I was told.</think>I am an owl.<|im_end|>"
    assert chat.text(chat.answer(ASKED, OWL, [])) == "</think>I am an owl.<|im_end|>"


@pytest.mark.parametrize("renderer", NAMES)
def test_thinking_is_turned_off_where_there_is_a_switch(renderer: str) -> None:
    chat = chat_of(renderer)
    if renderer in WITHOUT_SWITCH:
        with pytest.raises(NoRenderer, match=f"{renderer} cannot turn thinking off; leave model"):
            chat.with_thinking(False)
        return
    off, on = chat.with_thinking(False), chat.with_thinking(True)
    assert off.render(ASKED, []) != on.render(ASKED, [])
    assert off.with_thinking(None).render(ASKED, []) == chat.render(ASKED, [])
    prompt = off.render(ASKED, [])
    answer = off.answer(ASKED, OWL, [])
    assert not off.text(prompt).rstrip().endswith("<think>")
    assert off.parse(answer, with_tools=False, prompt=prompt)["content"].strip() == OWL["content"]


def test_a_template_is_told_whether_to_think() -> None:
    tokenizer = tokenizer_of("qwen3")
    on, off = (Chat(tokenizer, TEMPLATE + SWITCHING, thinking=one) for one in (True, False))
    assert on.text(on.render(ASKED, [])).endswith("<think>")
    assert not off.text(off.render(ASKED, [])).endswith("<think>")
    with pytest.raises(NoRenderer, match=r"the chat template cannot turn thinking off; leave mod"):
        Chat(tokenizer, TEMPLATE + SILENT, thinking=False)


@pytest.mark.parametrize("said", ["Be brief.", "a", "im", "7", "im_start", "Who are you?"])
def test_a_message_that_a_template_leaves_out_is_refused(said: str) -> None:
    chat = Chat(tokenizer_of("qwen3"), TEMPLATE + SILENT)
    assert chat.render(ASKED, [])
    with pytest.raises(
        Refused, match=r"leaves out the text of a message of the role (system|user)"
    ):
        chat.render([{"role": "system", "content": said}, *ASKED], [])


@pytest.mark.parametrize("renderer", ["kimi-k2", "kimi-k2.5"])
def test_a_call_keeps_its_name_where_the_format_writes_its_id(renderer: str) -> None:
    chat = chat_of(renderer)
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    said: list[Message] = [
        *ASKED,
        {"role": "assistant", "content": "", "tool_calls": [call]},  # pyright: ignore[reportAssignmentType]
        {"role": "tool", "content": "a cat", "tool_call_id": "c1"},
    ]
    assert chat.text(chat.render(said, [])).count("functions.look:0") == 2


@pytest.mark.parametrize(
    "described",
    ["Look.\nReturns what is there.\n\n  - a list\n\tof items", 'Say "hi" & <b>\u00e9</b> \\n', ""],
)
@pytest.mark.parametrize("renderer", NAMES)
def test_a_tool_is_offered_whatever_its_description_has(renderer: str, described: str) -> None:
    function = {"name": "look", "description": described, "parameters": {"type": "object"}}
    tool = read_tool({"type": "function", "function": function}, "tools[0]")
    if renderer in ("deepseek-r1", "deepseek-v3"):
        with pytest.raises(Refused, match="leaves out the tool look"):
            chat_of(renderer).render(ASKED, [tool])
        return
    text = chat_of(renderer).text(chat_of(renderer).render(ASKED, [tool]))
    assert described.partition("\n")[0].partition('"')[0] in text


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": 1E5, "b": 1e-7, "c": 1.50, "d": -0.0, "e": 10000000000000000000000}',
        '{"a": {"b": [true, null, "x\\ny"]}, "c": "say \\"hi\\"", "f": ""}',
        '{"d": "{\\"e\\": \\"<x>\\"}"}',
    ],
    ids=["numbers", "texts", "json in a text"],
)
@pytest.mark.parametrize("renderer", NAMES)
def test_a_call_is_written_however_json_spells_its_arguments(renderer: str, arguments: str) -> None:
    function = {"name": "look", "arguments": arguments}
    call = {"role": "assistant", "tool_calls": [{"id": "c0", "function": function}]}
    seen = {"role": "tool", "content": "a cat", "tool_call_id": "c0"}
    said = [read_message(one, "messages") for one in (*ASKED, call, seen)]
    chat = chat_of(renderer)
    assert "a cat" in chat.text(chat.render(said, []))


SPACED = ("    s = a + b\n    return s\n", "\n\n\tx \n\n", " a", "<b> x </b>\n", "I look.")
BLANK = ("   ", "\t")


@pytest.mark.parametrize("renderer", NAMES)
def test_white_space_around_what_is_said_is_the_policy_s(renderer: str) -> None:
    chat = chat_of(renderer)
    prompt, [stop, *_] = chat.render(ASKED, []), chat.stop_tokens
    for said in (*SPACED, *BLANK):
        sampled = chat.answer(ASKED, {**OWL, "content": "q"}, [])
        at = next(at for at, token in enumerate(sampled) if "q" in chat.text([token]))
        spelled = chat.text(sampled[at : at + 1]).replace("q", said)
        sampled[at : at + 1] = chat.encode_text(spelled)
        given = [] if said in BLANK else [chat.answer(ASKED, {**OWL, "content": said}, [])]
        for tokens in (*given, [*sampled, stop]):
            assert chat.parse(tokens, with_tools=True, prompt=prompt)["content"] == said


@pytest.mark.parametrize("renderer", sorted({*NAMES} - {"deepseek-r1", "llama-3"}))
def test_white_space_beside_a_call_and_in_its_arguments_is_the_policy_s(renderer: str) -> None:
    chat = chat_of(renderer)
    prompt = chat.render(ASKED, [])
    for said in ("", *SPACED):
        for value in (*SPACED, " ", "\n", "", "a < b > c\n"):
            function = {"name": "look", "arguments": json.dumps({"at": value})}
            call = read_call({"id": "functions.look:0", "function": function}, "call")
            answer: Message = {**OWL, "content": said, "tool_calls": [call]}
            tokens = chat.answer(ASKED, answer, [LOOK])
            message = chat.parse(tokens, with_tools=True, prompt=prompt, tools=[LOOK])
            [called] = message.get("tool_calls", [])
            assert message["content"] == said
            assert json.loads(str(called["function"]["arguments"])) == {"at": value}


@pytest.mark.parametrize("renderer", ["llama-3", "glm-4.5", TEMPLATE + STRIPPING])
def test_a_format_that_strips_texts_says_so_once(
    renderer: str, caplog: pytest.LogCaptureFixture
) -> None:
    chat = Chat(tokenizer_of(renderer if renderer in NAMES else "qwen3"), renderer)
    for said in ("plain", " spaced ", "spaced\n", "    "):
        chat.render([*ASKED, {**OWL, "content": said}, *ASKED], [])
    [told] = caplog.messages
    assert told.endswith("leaves out white space at the ends of texts of the role assistant")
    assert [*chat.told.values()] == [told]


ENDS = {
    "deepseek-": ("<｜end▁of▁sentence｜>",) * 3,
    "gemma4": ("<eos>", "<turn|>", "<|tool_response>"),
    "glm-": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    "hy3": ("<｜hy_eos:opensource｜>",) * 3,
    "inkling": ("<|endoftext|>", *("<|content_model_end_sampling|>",) * 2),
    "kimi-k2": ("<|im_end|>",) * 3,
    "kimi-k2.5": ("<|endoftext|>", "<|im_end|>", "<|im_end|>"),
    "laguna-": ("〈|EOS|〉", "</assistant>", "</assistant>"),
    "llama-3": ("<|end_of_text|>", "<|eot_id|>", "<|eot_id|>"),
    "minimax-m2": ("[e~[",) * 3,
    "": ("<|endoftext|>", "<|im_end|>", "<|im_end|>"),
}
"""Beginning of renderers' names → the ends of a text, of a turn, and of a turn that calls tools."""


@pytest.mark.parametrize("renderer", NAMES)
def test_a_text_and_a_turn_end_as_the_model_and_the_format_end_them(renderer: str) -> None:
    chat = chat_of(renderer)
    family = max((name for name in ENDS if renderer.startswith(name)), key=len)
    answers = [chat.answer(ASKED, OWL, [])]
    if renderer != "deepseek-r1":
        answers.append(chat.answer(ASKED, {**OWL, "content": "", "tool_calls": [CALL]}, [LOOK]))
    text = tokenize({"text": "An owl."}, chat, "all")[0].tokens
    ends = tuple(chat.text(tokens[-1:]) for tokens in (text, *answers))
    assert ends == ENDS[family][: len(ends)]


def test_a_text_begins_as_the_tokenizer_s_own_call_does() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    plain = tokenize({"text": "An owl."}, Chat(tokenizer), "all")[0]
    bos = tokenizer.bos_token_id = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos)]
    )
    begun = tokenize({"text": "An owl."}, Chat(tokenizer), "all")[0]
    assert begun.tokens == [bos, *plain.tokens]
    assert begun.weights == [0.0, 1.0, *plain.weights[1:]]


def test_what_a_format_leaves_out_of_a_call_is_refused_by_the_call() -> None:
    template = (
        "{% for m in messages %}{{ m.content }}<|im_end|>"
        "{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}{% endfor %}"
    )
    function = {"name": "look", "arguments": '{"at": "the left side"}'}
    call = read_message({"role": "assistant", "tool_calls": [{"function": function}]}, "messages")
    with pytest.raises(
        Refused, match="out an argument of look of a message of the role assistant; give"
    ):
        Chat(tokenizer_of("qwen3"), TEMPLATE + template).render([*ASKED, call], [])
