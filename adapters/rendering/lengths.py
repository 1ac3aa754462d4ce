"""The bound on a conversation's length by its characters, before it is rendered."""

from collections.abc import Sequence
from functools import lru_cache
from unicodedata import normalize

from adapters.calls import Message, Refused
from adapters.rendering.chat import Chat

TEXT = "a" + 64 * " " + 64 * "\n" + 8 * "\U000f0000" + "\u00e9\u6f22b"
"""A text that a tokenizer which shortens texts, or has an unknown token, does not give back."""
FIRST = "This is said first."
CONVERSATION: tuple[Message, ...] = (
    {"role": "user", "content": FIRST},
    {"role": "assistant", "content": "This is answered."},
    {"role": "user", "content": "This is said last."},
)


def check_length(chat: Chat, messages: Sequence[Message]) -> None:
    """Refuse messages of more characters than the model's context can hold in tokens.

    The assistant's do not count, since formats leave out reasoning of an earlier turn.
    """
    longest = longest_token(chat) if chat.context is not None else 0
    if not longest or chat.context is None:
        return
    said = [message["content"].strip() for message in messages if message["role"] != "assistant"]
    if sum(map(len, said)) <= chat.context * longest:
        return
    characters = sum(len(normalize("NFC", text)) for text in said)  # as many tokenizers read it
    if characters > chat.context * longest:
        raise too_long(chat.context, f"{characters} characters, more than these can hold")


def too_long(context: int, have: str) -> Refused:
    """Return the refusal of messages that `have` more than the context holds."""
    return Refused(
        400,
        f"This model's maximum context length is {context} tokens, and the messages have {have}. "
        "Please reduce the length of the messages.",
        code="context_length_exceeded",
        param="messages",
    )


@lru_cache(maxsize=8)
def longest_token(chat: Chat) -> int:
    """Return the characters of the longest token; 0 if the format may hold longer texts."""
    if chat.text(chat.encode(TEXT)).strip() != TEXT:
        return 0
    try:
        text = chat.text(chat.render(CONVERSATION, ()))
    except Refused:
        return 0
    return max(map(len, chat.vocabulary())) if FIRST in text else 0
