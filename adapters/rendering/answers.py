"""An answer that a row gives, as the tokens that a model samples, and what a format loses of it.

Formats write an answer of the past otherwise than the model has sampled it: without its reasoning,
or with another beginning than the prompt's. The ways to its tokens are tried in turn.

A renderer may lose a text that it was given. Texts are looked for without their whitespace, which
formats strip and indent, in the order of their messages, each at a place of its own.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from ratchet.adapters.calls import Message, Tool
from ratchet.adapters.rendering.messages import parse_text

FOLLOWING: Message = {"role": "user", "content": "What else?"}
"""Message after an answer in the middle of a conversation."""

THOUGHT, ANSWERED_TEXT = "q0thought0q", "q0said0q"
"""Reasoning and a text by which a format shows how it writes them."""

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class AskedAnswer:
    """An answer to messages, the prompt that asks for it, and how a format writes."""

    messages: Sequence[Message]
    answer: Message
    prompt: list[int]
    write: Callable[[Sequence[Message], bool], list[int]]
    """Renders messages, with the header of the next answer if that is asked for."""
    text: Callable[[Sequence[int]], str]
    encode: Callable[[str], list[int]]
    """Encodes what the format writes."""
    encode_text: Callable[[str], list[int]]
    """Encodes what the answer says, in which nothing is a mark of the format."""


def split_thought(answer: Message) -> tuple[str, str]:
    """Return the reasoning of an answer and the rest of its text."""
    before, closed, said = answer["content"].rpartition(CLOSE)
    thought = answer.get("reasoning_content")
    if thought is None and closed:
        return before.replace(OPEN, "").strip(), said.lstrip()
    return thought or "", answer["content"]


def opens_thought(ending: str) -> bool:
    """Tell whether a prompt that ends so begins the answer's reasoning."""
    return ending.rstrip().endswith(OPEN)


def write_answer(asked: AskedAnswer) -> Iterator[list[int]]:
    """Yield the tokens of an answer in the ways that a format can write it behind its prompt.

    White space around its text, which formats strip, is the model's, and stays.
    """
    content, (_, said) = asked.answer["content"], split_thought(asked.answer)
    plain = _write(asked)
    if said != said.strip():
        ways = [*plain]
        marked: Message = {**asked.answer, "content": content.removesuffix(said) + ANSWERED_TEXT}
        for tokens in _write(replace(asked, answer=marked)):
            if ANSWERED_TEXT in (text := asked.text(tokens)):
                whole = text.replace(ANSWERED_TEXT, said)
                same = [way for way in ways if asked.text(way) == whole]
                yield same[0] if same else _exchange(asked, tokens, ANSWERED_TEXT, said)
        plain = iter(ways)
    yield from plain


def _write(asked: AskedAnswer) -> Iterator[list[int]]:
    """Yield the tokens of an answer in the ways that a format itself has.

    An answer without reasoning is first written as in the middle of a conversation, since templates
    write an empty thought into the last one.
    """
    said = [*asked.messages, asked.answer]
    thinks = asked.answer.get("reasoning_content") or CLOSE in asked.answer["content"]
    for conversation in [said] if thinks else [[*said, FOLLOWING], said]:
        written = asked.write(conversation, False)
        if written[: len(asked.prompt)] == asked.prompt and _thinks_first(asked, written):
            yield written[len(asked.prompt) :]
    yield from _behind_thought(asked)


def _behind_thought(asked: AskedAnswer) -> Iterator[list[int]]:
    """Yield the tokens of an answer behind its reasoning, which may be empty.

    What comes before the answer is rendered without reasoning, which formats drop from there.
    """
    thought, said = split_thought(asked.answer)
    earlier = [without_thought(message) for message in asked.messages]
    plain = without_thought({**asked.answer, "content": said})
    prompt = asked.write(earlier, True)
    written = asked.write([*earlier, {**plain, "reasoning_content": THOUGHT}], False)
    if written[: len(prompt)] == prompt and THOUGHT in asked.text(written[len(prompt) :]):
        yield _exchange(asked, written[len(prompt) :], THOUGHT, thought)
    elif opens_thought(asked.text(prompt[-8:])):
        written = asked.write([*earlier, plain], False)
        alike = [one == other for one, other in zip(prompt, written, strict=False)]
        rest = written[[*alike, False].index(False) :]
        closes = asked.text(rest).lstrip().startswith(CLOSE)
        if closes:
            yield [*asked.encode_text(thought), *rest]
        else:
            closed = asked.encode(f"{CLOSE}\n\n")
            yield [*asked.encode_text(f"{thought}\n"), *closed, *rest]


def _thinks_first(asked: AskedAnswer, written: Sequence[int]) -> bool:
    """Tell whether an answer whose prompt begins its reasoning has it there."""
    thought, _ = split_thought(asked.answer)
    if not opens_thought(asked.text(asked.prompt[-8:])):
        return True
    before = asked.text(written[len(asked.prompt) :]).partition(CLOSE)[0]
    return "".join(before.split()) == "".join(thought.split())


def _exchange(asked: AskedAnswer, written: list[int], old: str, new: str) -> list[int]:
    """Put a text in the place of another one, as it stands first in tokens."""
    lengths = range(len(written) + 1)
    end = next(length for length in lengths if old in asked.text(written[:length]))
    before, _, after = asked.text(written[:end]).partition(old)
    start = next(at for at in range(end, -1, -1) if before.startswith(asked.text(written[:at])))
    begun = before.removeprefix(asked.text(written[:start]))
    return [*written[:start], *asked.encode_text(begun + new + after), *written[end:]]


def without_thought(message: Message) -> Message:
    kept = {key: value for key, value in message.items() if key != "reasoning_content"}
    return cast(Message, kept)


Frame = tuple[str, str]
"""White space that a format writes before and behind a text."""

SPACES = "".join(filter(str.isspace, map(chr, range(0x3001))))
SHIELDS = "".join(map(chr, range(0x10FF00, 0x10FF00 + len(SPACES))))
"""Letters of nobody's, in the place of white space that a parser would strip."""
SHIELD, UNSHIELD = str.maketrans(SPACES, SHIELDS), str.maketrans(SHIELDS, SPACES)
BLANK = re.compile(r"(^\s*\Z)")
CALL_MARK = re.compile(r"(<(?:[^<>/][^<>]*>|/[^<>]*>(?:\s*(?=<[^/]))?))")
"""Mark around a call's argument, and the white space before the mark of a further one."""


def shield(text: str, kept: re.Pattern[str]) -> str:
    """Shield the white space of a text but for what is `kept`."""
    parts = kept.split(text)
    return "".join(part if at % 2 else part.translate(SHIELD) for at, part in enumerate(parts))


def find_frame(shielded: object, said: str) -> Frame:
    """Return the white space that a format has written around what was said."""
    before, _, after = str(shielded or "").translate(UNSHIELD).partition(said)
    return ("", "") if (before + after).strip() else (before, after)


def restore_spaces(stripped: str, shielded: object, frame: Frame) -> str:
    """Return a text with the white space that a parser has stripped, without the format's own."""
    text, (before, after) = str(shielded or "").translate(UNSHIELD), frame
    if text.strip() != stripped.strip():
        return stripped  # the parser has read what is shielded as something else
    while not text.startswith(before):
        before = before[:-1]
    text = text.removeprefix(before)
    while not text.endswith(after):
        after = after[1:]
    return text.removesuffix(after)


SHORT_WORD = 12
"""Letters below which a text may stand in the format's own words by chance."""

Spellings = tuple[str, ...]
"""The ways in which a format may write one value."""


Lost = tuple[int, str]
"""The place of a message, and the name of its part that a renderer has left out."""


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
                return index, what
            ends.append(end)
        for call in message.get("tool_calls") or ():
            if not written.has_arguments(call["function"]["arguments"], first):
                return index, f"an argument of {call['function']['name']}"
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
    """Return messages with a mark in place of every text; None if no text is short."""
    if not any(0 < len(_bare(message["content"])) < SHORT_WORD for message in messages):
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
