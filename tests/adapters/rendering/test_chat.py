from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ratchet.adapters.calls import Message
from ratchet.adapters.rendering.chat import Chat

TINY = Path(__file__).parents[3] / "engine" / "tiny_chat"
HELLO: list[Message] = [{"role": "user", "content": "hello"}]
MORE: list[Message] = [{"role": "user", "content": "and?"}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def chat(tokenizer: PreTrainedTokenizerFast) -> Chat:
    return Chat(tokenizer)


def letters(chat: Chat, text: str) -> list[int]:
    """Encode each character by itself: a valid answer, but not the canonical encoding."""
    return [token for character in text for token in chat.encode(character)]


def test_a_prompt_ends_with_the_header_of_the_answer(chat: Chat) -> None:
    text = chat.text(chat.render(HELLO, []))
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_the_next_prompt_begins_with_the_previous_tokens(chat: Chat) -> None:
    prompt, said = chat.render(HELLO, []), [*letters(chat, "Hi there"), chat.stop_tokens[0]]
    extended = chat.extend(prompt, said, MORE, [])
    assert extended is not None
    assert extended[: len(prompt) + len(said)] == prompt + said
    rest = chat.text(extended[len(prompt) + len(said) :])
    assert rest == "\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"


def test_an_answer_that_was_cut_short_is_closed(chat: Chat) -> None:
    prompt, said = chat.render(HELLO, []), chat.encode("Hi th")
    extended = chat.extend(prompt, said, MORE, []) or []
    assert chat.text(extended[len(prompt) :]).startswith("Hi th<|im_end|>\n<|im_start|>user")


@pytest.mark.parametrize("answer", ["<think>hm", "<think>hm</think>ok", "<think><tool_call>"])
@pytest.mark.parametrize("end", ["", "<|im_end|>", "<|endoftext|>"])
def test_reasoning_stays_in_the_history_as_it_was_sampled(
    chat: Chat, answer: str, end: str
) -> None:
    prompt, said = chat.render(HELLO, []), chat.encode(answer + end)
    extended = chat.extend(prompt, said, MORE, []) or []
    assert extended[: len(prompt) + len(said)] == prompt + said
    assert chat.text(extended).endswith("user\nand?<|im_end|>\n<|im_start|>assistant\n")


def test_a_prompt_cannot_be_extended_by_an_assistant_s_message(chat: Chat) -> None:
    new: list[Message] = [{"role": "assistant", "content": "written by the client"}]
    assert chat.extend(chat.render(HELLO, []), chat.encode("Hi"), new, []) is None


def test_tool_results_are_rendered_after_the_call(chat: Chat) -> None:
    prompt, said = chat.render(HELLO, []), chat.encode(CALL + "<|im_end|>")
    extended = chat.extend(prompt, said, [{"role": "tool", "content": "a cat"}], []) or []
    tail = chat.text(extended[len(prompt) + len(said) :])
    assert "<tool_response>\na cat\n</tool_response>" in tail


def test_a_tool_call_is_parsed(chat: Chat) -> None:
    message = chat.parse(chat.encode(f"Let me see. {CALL}<|im_end|>"), with_tools=True)
    assert message["content"] == "Let me see. "
    assert message.get("tool_calls") == [
        {"type": "function", "function": {"name": "look", "arguments": '{"at": "é"}'}}
    ]


@pytest.mark.parametrize(
    ("answer", "with_tools"),
    [
        ('<tool_call>\n{"name": "look"\n</tool_call>', True),
        (CALL + '<tool_call>\n{"name": "lo', True),
        ('<tool_call>\n{"name": "look", "arguments": 3}\n</tool_call>', True),
        ("<tool_call>\n[]\n</tool_call>", True),
        (CALL, False),
    ],
)
def test_a_malformed_tool_call_is_content(chat: Chat, answer: str, with_tools: bool) -> None:
    message = chat.parse(chat.encode(answer + "<|im_end|>"), with_tools=with_tools)
    assert message == {"role": "assistant", "content": answer}


def test_reasoning_is_parsed_apart_from_the_content(chat: Chat) -> None:
    message = chat.parse(chat.encode("<think>\nhm\n</think>\n\nyes<|im_end|>"), with_tools=False)
    assert (message.get("reasoning_content"), message["content"]) == ("hm", "yes")


def test_spelling_returns_the_exact_bytes_of_a_partial_character(chat: Chat) -> None:
    tokens = chat.encode("\N{SNOWMAN}\N{GRINNING FACE}")
    assert len(tokens) > 2
    assert bytes(byte for token in tokens for byte in chat.spelling(token)[1]).decode() == "☃😀"
    assert chat.spelling(chat.stop_tokens[0]) == ("<|im_end|>", list(b"<|im_end|>"))


def test_the_context_defaults_to_the_tokenizer_s(tokenizer: PreTrainedTokenizerFast) -> None:
    assert Chat(tokenizer).context == tokenizer.model_max_length
    assert Chat(tokenizer, context=100).context == 100


def test_an_answer_without_reasoning_has_no_empty_thought_to_train(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Qwen3's template writes one into the last message, which a model is not asked behind."""
    qwen3 = Chat(tokenizer, "qwen3")
    answer: Message = {"role": "assistant", "content": "yes"}
    assert qwen3.text(qwen3.answer(HELLO, answer, [])) == "yes<|im_end|>"
