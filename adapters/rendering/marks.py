"""Control tokens that a text spells, kept as text.

A renderer joins the texts of messages with the marks of its format and encodes the whole, so that a
tokenizer cannot tell the format's marks from marks that a user has written. Therefore each mark in
a message is split by letters that the tokenizer below knows and takes out again. Conversations that
have every part of one show which tokens are marks.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import count
from typing import Any, cast

from renderers.base import Tokenizer
from tokenizers import Tokenizer as Backend

from ratchet.adapters.calls import Message, Refused, Tool, ToolCall
from ratchet.adapters.rendering.answers import CLOSE, OPEN
from ratchet.adapters.rendering.messages import parse_text

LOOK: Tool = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
SYSTEM: Message = {"role": "system", "content": "Be brief."}
USER: Message = {"role": "user", "content": "Where?"}
PLAIN_ANSWER: Message = {"role": "assistant", "content": "Here."}
CALL: ToolCall = {
    "type": "function",
    "function": {"name": "look", "arguments": '{"at": "left"}'},
    "id": "1",
}
CALLING: Message = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "Hm.",
    "tool_calls": [CALL],
}
RESULT: Message = {"role": "tool", "content": "a cat", "tool_call_id": "1", "name": "look"}

Write = Callable[[Sequence[Message], Sequence[Tool], bool], Sequence[int]]
"""Renders messages and tools, perhaps with the next answer's header; empty if it cannot."""


def named_by_id(call_id: str) -> list[Message]:
    """Return a question and a call that has this id."""
    return [USER, {"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": call_id}]}]


def probe_marks(write: Write) -> tuple[set[int], set[int]]:
    """Return the tokens of a format, and its tokens around an answer's reasoning and calls."""
    plain = {*write([USER, PLAIN_ANSWER], [], False), *write([USER], [], True)}
    own = {*write([USER, CALLING], [], False)} - plain
    whole = [SYSTEM, USER, CALLING, RESULT, PLAIN_ANSWER]
    return plain | own | {*write(whole, [LOOK], False), *write(whole[1:], [], True)}, own


SPLIT = "q0Zx{}Xz0q"
"""Letters and digits, which no JSON, XML or template writes otherwise."""


class Marks:
    """The control tokens of a tokenizer and a format, by their spelling.

    `own` are the tokens around an answer's reasoning and its calls: in an answer's text they are
    what they spell.
    """

    def __init__(self, tokenizer: object, written: Iterable[int], own: Iterable[int]) -> None:
        self._tokenizer = cast(Tokenizer, tokenizer)
        added = _added_tokens(tokenizer)
        written = {*written}
        self.tokens = {
            spelled: token
            for token, (spelled, special) in added.items()
            if spelled.strip() and (special or token in written)
        }
        self._own = {OPEN, CLOSE, *(added[token][0] for token in own if token in added)}
        self._all = _either(self.tokens)
        self._of_others = _either({*self.tokens} - self._own)

    def are_in(self, value: object, role: str | None = None) -> bool:
        """Tell whether a text of a value, of a message of this role, spells a mark."""
        pattern = self._pattern(role)
        return pattern is not None and any(pattern.search(text) for text in _texts(value))

    def split(self, value: Any, by: str, role: str | None = None) -> Any:
        """Return a value with each mark in its texts split, so that its texts have no mark."""
        pattern = self._pattern(role)
        if pattern is None:
            return value
        return _map_texts(
            value, lambda text: pattern.sub(lambda mark: mark[0][0] + by + mark[0][1:], text)
        )

    def parts(self, text: str) -> list[str]:
        """Split a text at its marks, which are parts of their own."""
        return [part for part in re.split(self._all, text) if part] if self._all else [text]

    def encode_text(self, text: str) -> list[int]:
        """Encode a text, its marks as plain letters; Refused if the tokenizer cannot."""
        tokens = self._encode_plain(text)
        if forged := {*tokens} & {*self.tokens.values()}:
            spelled = self._tokenizer.decode([*forged][:1])
            raise Refused(
                400,
                f"a text has {spelled!r}, which the tokenizer writes as a control token alone; "
                "leave it out",
            )
        return tokens

    @cached_property
    def _encode_plain(self) -> Callable[[str], list[int]]:
        """A copy of the tokenizer to which a mark is no more than its letters."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Backend):
            return lambda text: self._tokenizer.encode(
                text, add_special_tokens=False, split_special_tokens=True
            )
        written = json.loads(backend.to_str())
        for added in written["added_tokens"]:
            added["special"] = added["special"] or added["content"] in self.tokens
        copy = Backend.from_str(json.dumps(written))
        copy.encode_special_tokens = True
        return lambda text: copy.encode(text, add_special_tokens=False).ids

    def _pattern(self, role: str | None) -> re.Pattern[str] | None:
        return self._of_others if role == "assistant" else self._all


class TextTokenizer:
    """A model's tokenizer that encodes split marks as text, and all else as the model's own does.

    It has no `__call__`, so that renderers encode by `encode` alone.
    """

    def __init__(self, tokenizer: object, marks: Marks, split: str) -> None:
        self._own = cast(Tokenizer, tokenizer)
        self._marks = marks
        self._split = split

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._own, name)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Encode a text in which marks may be split."""
        if self._split not in text:
            return self._own.encode(text, add_special_tokens=False)
        found: list[int] = []
        for part in self._marks.parts(text):
            if self._split in part:
                found += self._marks.encode_text(part.replace(self._split, ""))
            else:
                found += self._own.encode(part, add_special_tokens=False)
        return found

    def apply_chat_template(self, messages: object, **options: Any) -> object:
        """Render a chat template, and encode what it writes."""
        tokenize = options.pop("tokenize", True)
        own = cast(Any, self._own)
        text = own.apply_chat_template(messages, tokenize=False, **options)
        return self.encode(text) if tokenize else text


def choose_split(messages: Sequence[Message], tools: Sequence[Tool]) -> str:
    """Choose the letters that split marks, such that no text has them."""
    texts = [*_texts([*messages]), *_texts([*tools])]
    names = (SPLIT.format(number or "") for number in count())
    return next(name for name in names if not any(name in text for text in texts))


def split_marks(
    messages: Sequence[Message], tools: Sequence[Tool], marks: Marks, by: str
) -> tuple[list[Message], list[Tool]]:
    """Split the marks in all texts of messages and tools."""
    said = []
    for message in messages:
        role = message["role"]
        said.append({**marks.split(_open_arguments(message), by, role), "role": role})
    return said, marks.split([*tools], by)


def spell_marks(messages: Sequence[Message], tools: Sequence[Tool], marks: Marks) -> bool:
    """Tell whether a text of messages or tools spells a mark."""
    return marks.are_in([*tools]) or any(
        marks.are_in(_open_arguments(message), message["role"]) for message in messages
    )


def _open_arguments(message: Message) -> Mapping[str, object]:
    """Return a message with the arguments of its calls as values where JSON escapes letters."""
    calls = message.get("tool_calls")
    if not calls or "\\u" not in json.dumps(calls):
        return message
    opened = []
    for call in calls:
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, str) and "\\u" in arguments:
            arguments = parse_text(arguments)
        opened.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": opened}


def _either(spelled: Iterable[str]) -> re.Pattern[str] | None:
    longest = sorted(spelled, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest))})") if longest else None


def _added_tokens(tokenizer: object) -> dict[int, tuple[str, bool]]:
    """Map the tokens that were added to a tokenizer to their spelling, and whether special."""
    known = cast(Any, tokenizer)
    named = {token: str(known.convert_ids_to_tokens(token)) for token in known.all_special_ids}
    added = {
        token: (str(one), bool(one.special)) for token, one in known.added_tokens_decoder.items()
    }
    return added | {token: (spelled, True) for token, spelled in named.items()}


def _texts(value: object) -> Iterator[str]:
    """Yield all texts in a value, its keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Change all texts in a value."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(str(key)): _map_texts(inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_map_texts(inner, change) for inner in value]
    return value
