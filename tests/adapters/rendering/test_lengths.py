"""Messages that the context cannot hold, told by their characters before they are rendered."""

import pytest
from transformers import AutoTokenizer

from ratchet.adapters.calls import Message, Refused
from ratchet.adapters.rendering.chat import Chat, check_length, longest_token
from tests.support.door.opened_door import TINY


def chat_of(renderer: str = "auto", context: int = 100) -> Chat:
    return Chat(AutoTokenizer.from_pretrained(TINY), renderer, context)


def said(role: str, text: str, many: int = 1) -> list[Message]:
    return [{"role": role, "content": text}] * many


def test_messages_are_refused_by_their_characters_at_once() -> None:
    chat = chat_of()
    most = 100 * longest_token(chat)
    check_length(chat, said("user", "x" * most))
    for messages in (said("user", "x" * (most + 1)), said("tool", "x" * 30, most // 30 + 1)):
        with pytest.raises(Refused, match="context length is 100 tokens") as refused:
            check_length(chat, messages)
        assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize("text", [" " * 90_000, "\n\n" * 45_000])
def test_what_may_fit_is_rendered_first(text: str) -> None:
    long = said("user", "x" * 90_000)
    with pytest.raises(Refused):
        check_length(chat_of(), long)
    check_length(chat_of(context=10**6), long)
    check_length(chat_of(), said("user", f"{text}hi{text}"))
    check_length(chat_of(), [*said("assistant", "<think>" + "x" * 90_000), *said("user", "hi")])


def test_no_token_holds_more_characters_than_the_longest_one() -> None:
    chat = chat_of()
    tokens = range(len(AutoTokenizer.from_pretrained(TINY)))
    assert longest_token(chat) >= max(len(chat.text([token])) for token in tokens) > 1
