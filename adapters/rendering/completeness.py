"""Whether what a renderer has written holds every text that it was given.

Texts are looked for without their whitespace, which formats strip and indent, and in the order of
their messages, each at a place of its own.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from adapters.calls import Message, Tool
from adapters.rendering.messages import parse_text

SHORT = 12
"""Letters below which a text may stand in the format's own words by chance."""

Spellings = tuple[str, ...]
"""The ways in which a format may write one value."""


@dataclass(frozen=True)
class Lost:
    """A part of a message that a renderer has left out, by a name for it."""

    message: int
    what: str


def find_lost(
    messages: Sequence[Message], text: str, respell: Callable[[str], str], reasoning: bool = False
) -> Lost | None:
    """Return the first text of messages that is not in what was rendered of them.

    Reasoning is looked for only in the last message and if it is asked for. `respell` returns a
    text as the tokenizer decodes it.
    """
    written, first = _Written(text, respell), 0
    for index, message in enumerate(messages):
        ends: list[int] = []
        for what, spellings in _pieces(message, reasoning and index == len(messages) - 1):
            end = written.take(spellings, first)
            if end is None:
                return Lost(index, what)
            ends.append(end)
        for call in message.get("tool_calls") or ():
            if not written.has_arguments(call["function"]["arguments"], first):
                return Lost(index, f"an argument of {call['function']['name']}")
        first = min(ends, default=first)
    return None


def find_lost_tool(tools: Sequence[Tool], text: str, respell: Callable[[str], str]) -> str | None:
    """Return the name of the first tool whose name or description was not rendered.

    Formats that write tools as code begin each line of a description with a mark of a comment.
    """
    written = _Written(text, respell)
    for tool in tools:
        function = tool["function"]
        described = function.get("description") or ""
        lines = (function["name"], *filter(str.strip, described.splitlines()))
        whole = (function["name"], described)
        if not any(all(written.has(_spell(one)) for one in said) for said in (whole, lines)):
            return function["name"]
    return None


def mark_texts(messages: Sequence[Message]) -> list[Message] | None:
    """Return messages with a mark in place of every text; None if none of the texts is short."""
    if not any(0 < len(_bare(message["content"])) < SHORT for message in messages):
        return None
    marked = [*messages]
    for index, message in enumerate(messages):
        if message["content"].strip() and "think>" not in message["content"]:
            marked[index] = {**message, "content": f"q{index}x said here q{index}z"}
    return marked


class _Written:
    """A rendered text without whitespace, and the places that are taken."""

    def __init__(self, text: str, respell: Callable[[str], str]) -> None:
        self._text = _bare(text)
        self._respell = respell
        self._taken: list[tuple[int, int]] = []

    def has(self, spellings: Spellings, first: int = 0) -> bool:
        """Tell whether a value is anywhere from a place on."""
        return any(
            _bare(spell(one)) in self._text[first:]
            for spell in (str, self._respell)
            for one in spellings
        )

    def has_arguments(self, arguments: object, first: int) -> bool:
        """Tell whether a call's arguments are there: as they were given, or each by itself."""
        if isinstance(arguments, str) and self.has((arguments,), first):
            return True
        return all(self.has(one, first) for one in _leaves(parse_text(arguments)))

    def take(self, spellings: Spellings, first: int) -> int | None:
        """Take the first free place of a value, and return its end; None if there is none."""
        found = self._find(spellings, first)
        if found is None:
            return None
        self._taken.append(found)
        return found[1]

    def _find(self, spellings: Spellings, first: int) -> tuple[int, int] | None:
        for spell in (str, self._respell):
            places = [self._place(_bare(spell(one)), first) for one in {*spellings}]
            if found := [place for place in places if place is not None]:
                return min(found)
        return None

    def _place(self, spelled: str, first: int) -> tuple[int, int] | None:
        at = self._text.find(spelled, first)
        while at >= 0:
            end = at + len(spelled)
            if all(end <= start or at >= stop for start, stop in self._taken):
                return at, end
            at = self._text.find(spelled, at + 1)
        return None


def _pieces(message: Message, reasoning: bool) -> Iterator[tuple[str, Spellings]]:
    """Yield the texts of a message by what they are."""
    thought, _, said = message["content"].rpartition("</think>")
    thought = thought.replace("<think>", "") if message["role"] == "assistant" else ""
    said = said if message["role"] == "assistant" else message["content"]
    thought = message.get("reasoning_content") or thought
    if reasoning and thought.strip():
        yield "the reasoning", (thought,)
    if said.strip():
        yield "the text", _spell(said)
    for call in message.get("tool_calls") or ():
        name = call["function"]["name"]
        yield f"the call of {name}", _spell(name)


def _leaves(value: object) -> Iterator[Spellings]:
    """Yield the keys and values of a call's arguments, each in its spellings."""
    if isinstance(value, Mapping):
        for key, inner in cast(Mapping[str, Any], value).items():
            yield _spell(str(key))
            yield from _leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)
    elif not isinstance(value, str) or value.strip():
        yield _spell(value)


def _spell(value: object) -> Spellings:
    """Return a value as text, as JSON in two ways, and as a text within JSON."""
    written = [json.dumps(value, ensure_ascii=ascii) for ascii in (False, True)]
    inner = [one[1:-1] for one in written] if isinstance(value, str) else []
    return (str(value), *written, *inner)


def _bare(text: str) -> str:
    return "".join(text.split())
