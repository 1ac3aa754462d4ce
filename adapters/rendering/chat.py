"""Messages rendered to tokens and parsed from them, by the `renderers` package."""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from itertools import pairwise, product
from typing import Any, cast
from unicodedata import normalize

from renderers import ParsedResponse, ToolCallParseStatus
from renderers.base import ParsedToolCall

from ratchet.adapters.calls import Completion, JsonObject, Message, Refused, Tool
from ratchet.adapters.rendering import answers, marks
from ratchet.adapters.rendering.messages import check_json, create_tool_call
from ratchet.adapters.rendering.renderer_names import AUTO, NoRenderer
from ratchet.adapters.rendering.renderers import choose_renderer

log = logging.getLogger(__name__)

CALLED_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
"""Name of a tool that was not offered, which a policy may call."""
DEEPEST_ARGUMENTS = 100
"""The most levels of a call's arguments; a client repeats them within a body."""

UNLIMITED = 10**9
"""Any `model_max_length` from here on is no limit: tokenizers without a limit say 10^30."""

PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTES = {chr(byte): byte for byte in PRINTABLE} | {
    chr(0x100 + i): byte for i, byte in enumerate(sorted({*range(0x100)} - {*PRINTABLE}))
}
"""The alphabet in which byte-level tokenizers write bytes (GPT-2's bytes_to_unicode)."""


class Chat:
    """A model's chat format: its Hugging Face tokenizer and a renderer.

    The renderer is a name of the `renderers` package, `jinja:` and the text of a chat template, or
    `auto`: what fits the model. NoRenderer if it does not fit.
    `context` is the largest number of tokens of a prompt and its answer together.
    """

    def __init__(
        self,
        tokenizer: object,
        renderer: str = AUTO,
        context: int | None = None,
        thinking: bool | None = None,
    ) -> None:
        self._chosen = choose_renderer(tokenizer) if renderer == AUTO else renderer
        self._tokenizer: Any = marks.KeptEncodings(tokenizer)
        self._writer = marks.Writer(self._tokenizer, self._chosen, thinking)
        self._others: dict[bool | None, Chat] = {}
        self.thinking = thinking
        self.renderer = self._writer.name
        self.tokenizer_sha = fingerprint(tokenizer)
        self.stop_tokens = list(self._writer.renderer.get_stop_token_ids())
        declared = getattr(tokenizer, "model_max_length", None)
        is_limit = type(declared) is int and declared < UNLIMITED
        self.read_context: int | None = declared if is_limit else None
        """The longest text that the model has read, if its tokenizer says so."""
        self.context = context or self.read_context
        self.told: dict[str, str] = {}
        """Warnings, each of which is told once."""
        self.encode_text, self.name_calls = self._writer.encode_text, self._writer.name_calls
        self.spells_marks, self.vocabulary = self._writer.spells_marks, self._tokenizer.get_vocab

    def with_thinking(self, thinking: bool | None) -> "Chat":
        """Return the chat format with thinking on, off or as the renderer has it.

        NoRenderer if the renderer or template has no switch for thinking.
        """
        if thinking == self.thinking:
            return self
        if thinking not in self._others:
            other = Chat(self._tokenizer, self._chosen, self.context, thinking)
            other.told = self.told
            self._others[thinking] = other
        return self._others[thinking]

    def tell_of_noise(self, prompt: int) -> None:
        """Warn of a prompt beyond the texts of the training; no service says it."""
        if self.read_context is not None and prompt > self.read_context:
            who = f"{self._tokenizer.name_or_path or 'the model'} has read; its answers are noise"
            text = f"a prompt of {prompt} tokens is beyond the {self.read_context} that {who}"
            self._tell("noise", text)

    def _tell(self, of: str, warning: str) -> None:
        if of not in self.told:
            self.told[of] = warning
            log.warning(warning)

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Render the prompt, which ends with the header of the answer.

        Refused if the renderer takes no such messages, or would leave out a text of theirs.
        """

        def write(said: Sequence[Message]) -> list[int]:
            return self._writer.write(said, tools, ask=True)

        tokens = write(messages)
        self._check_whole(messages, tokens, write)
        if tools and (lost := answers.find_lost_tool(tools, self.text(tokens), self._respell)):
            why = f"the renderer {self.renderer} leaves out the tool {lost}"
            raise Refused(400, f"{why}; {marks.RENDERER_REMEDY}, such as qwen3")
        return tokens

    def extend(
        self,
        prompt: Sequence[int],
        sampled: Sequence[int],
        new: Sequence[Message],
        tools: Sequence[Tool],
    ) -> list[int] | None:
        """Render the next prompt, which begins with exactly `prompt` and `sampled`.

        An answer that was cut short is closed first. The new messages are rendered by themselves,
        so no token of the model's is encoded anew. Return None if the renderer cannot do this, or
        would leave out a text of theirs.
        """

        def write(said: Sequence[Message]) -> list[int]:
            return self._extend([*prompt], [*sampled], said, tools) or []

        extended, known = write(new), len(prompt) + len(sampled)
        try:
            self._check_whole(new, extended[known:], lambda said: write(said)[known:])
        except Refused:
            return None
        return extended or None

    def answer(
        self, messages: Sequence[Message], answer: Message, tools: Sequence[Tool]
    ) -> list[int]:
        """Return the tokens that a model samples to give an answer to messages, its end included.

        Refused if the renderer writes other tokens before the answer than the prompt that asks for
        it, or leaves out a part of the answer.
        """

        def write(said: Sequence[Message], ask: bool) -> list[int]:
            return self._writer.write(said, tools, ask=ask)

        prompt = write(messages, True)
        asked = answers.AskedAnswer(
            messages, answer, prompt, write, self.text, self.encode, self.encode_text
        )
        lost = None
        for tokens in answers.write_answer(asked):
            end = next((at for at, token in enumerate(tokens) if token in self.stop_tokens), None)
            whole = [*tokens[:end], self._turn_ends[bool(answer.get("tool_calls"))]]
            lost = answers.find_lost([answer], self.text(whole), self._respell, reasoning=True)
            if lost is None:
                return whole
        raise self._refuse_answer(answer, lost)

    @cached_property
    def _turn_ends(self) -> Mapping[bool, int]:
        """The stop before what the format writes next, by whether a turn calls tools."""
        ends = dict.fromkeys((False, True), self.stop_tokens[0])
        for turn, following in ((marks.PLAIN_ANSWER, marks.USER), (marks.CALLING, marks.RESULT)):
            with suppress(Refused):
                asked = len(self._writer.write([marks.USER], [marks.LOOK], ask=False))
                written = self._writer.write([marks.USER, turn, following], [marks.LOOK], ask=False)
                stops = (token for token in written[asked:] if token in self.stop_tokens)
                ends["tool_calls" in turn] = next(stops, self.stop_tokens[0])
        return ends

    @cached_property
    def around_text(self) -> tuple[list[int], int]:
        """What begins a text in the tokenizer's own call, and its end: a stop that ends no turn."""
        first = self._tokenizer.encode("a", add_special_tokens=True)[:1]
        begins = first == [getattr(self._tokenizer, "bos_token_id", None)]
        ends = [token for token in self.stop_tokens if token not in self._turn_ends.values()]
        return first if begins else [], [*ends, self.stop_tokens[-1]][0]

    def has_ended(self, sampled: Sequence[int]) -> bool:
        """Tell whether the model ended its turn itself."""
        return bool(sampled) and sampled[-1] in self.stop_tokens

    def parse(
        self,
        sampled: Sequence[int],
        *,
        with_tools: bool,
        prompt: Sequence[int] = (),
        tools: Sequence[Tool] = (),
    ) -> Message:
        """Parse the assistant's message, whose tool calls have no ids yet.

        The prompt tells whether the answer begins within its reasoning, and the tools of which
        type the arguments are. If a tool call is malformed, or `with_tools` is false, the whole
        answer is plain content.
        """
        parsed, *shielded = self._parse(sampled, prompt, tools)
        offered = [tool["function"]["name"] for tool in tools]
        well_formed = all(is_call(call, offered) for call in parsed.tool_calls)
        if parsed.tool_calls and not (with_tools and well_formed):
            return {"role": "assistant", "content": self.decode_answer(sampled)}
        content, thought, arguments = self._restore(parsed, *shielded)
        message: Message = {"role": "assistant", "content": content}
        if thought:
            message["reasoning_content"] = thought
        if parsed.tool_calls:
            message["tool_calls"] = [
                create_tool_call(str(call.name), json.dumps(own, ensure_ascii=False), None)
                for call, own in zip(parsed.tool_calls, arguments, strict=True)
            ]
        return message

    def _parse(
        self, sampled: Sequence[int], prompt: Sequence[int], tools: Sequence[Tool]
    ) -> list[ParsedResponse]:
        """Parse an answer, and again with its white space shielded from the parser."""
        parsed = self._writer.parse(sampled, prompt, tools)
        if answers.CLOSE in parsed[0].content and answers.opens_thought(self.text(prompt[-8:])):
            return self._writer.parse([*self.encode(answers.OPEN), *sampled], prompt, tools)
        return parsed

    def _restore(
        self, parsed: ParsedResponse, by_text: ParsedResponse, by_value: ParsedResponse
    ) -> tuple[str, str, list[JsonObject]]:
        """Return an answer's text, reasoning and arguments with all white space of the model's."""
        calls, thought = parsed.tool_calls, parsed.reasoning_content or ""
        frames = self._frames.get((bool(thought), bool(calls)), (("", ""),) * 3)
        spaced = by_text.content or by_value.content  # a blank one is shielded in the second
        content = answers.restore_spaces(parsed.content, spaced, frames[0])
        arguments = [cast(JsonObject, call.arguments) for call in calls]
        for own, call in zip(arguments, by_value.tool_calls, strict=False):
            given: Any = call.arguments if isinstance(call.arguments, dict) else {}
            for name, value in own.items():
                if isinstance(value, str) and isinstance(kept := given.get(name), str):
                    own[name] = answers.restore_spaces(value, kept, frames[2])
        thought = answers.restore_spaces(thought, by_text.reasoning_content, frames[1])
        return content if content.strip() or not calls else "", thought, arguments

    @cached_property
    def _frames(self) -> Mapping[tuple[bool, bool], Sequence[answers.Frame]]:
        """White space of the format's own around a text, reasoning and an argument.

        It depends on whether an answer has reasoning, and calls.
        """
        frames: dict[tuple[bool, bool], Sequence[answers.Frame]] = {}
        for thinks, calls in product((False, True), repeat=2):
            said: Any = {**marks.PLAIN_ANSWER}
            said |= {"reasoning_content": answers.THOUGHT} if thinks else {}
            said |= {"tool_calls": [marks.CALL]} if calls else {}
            with suppress(Refused):
                prompt = self._writer.write([marks.USER], [marks.LOOK], ask=True)
                sampled = self.answer([marks.USER], said, [marks.LOOK])
                _, by_text, by_value = self._parse(sampled, prompt, [marks.LOOK])
                called = [one.arguments for one in by_value.tool_calls if one.arguments]
                value = called[0].get("at") if called and isinstance(called[0], dict) else ""
                frames[thinks, calls] = (
                    answers.find_frame(by_text.content, marks.PLAIN_ANSWER["content"]),
                    answers.find_frame(by_text.reasoning_content, answers.THOUGHT),
                    answers.find_frame(value, "left"),
                )
        return frames

    def text(self, tokens: Sequence[int]) -> str:
        """Decode tokens, special ones included."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False) if tokens else ""

    def decode_answer(self, sampled: Sequence[int]) -> str:
        """Decode an answer without the token that ended it."""
        return self.text(sampled[:-1] if self.has_ended(sampled) else sampled)

    def encode(self, text: str) -> list[int]:
        """Encode a text; special tokens that are written out in it become special tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def pieces(self, text: str) -> list[str]:
        """Split a text where its tokens end. A character of several tokens stays whole."""
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ends = {end for _, end in encoded["offset_mapping"]} | {len(text)}
        return [text[start:end] for start, end in pairwise(sorted({0, *ends}))]

    def count_lost_thoughts(self, messages: Sequence[Message], tokens: Sequence[int]) -> int:
        """Count the messages whose reasoning is not in the tokens that were rendered of them."""
        spoken = (answers.split_thought(one) for one in messages if one["role"] == "assistant")
        text, said = self.text(tokens), {"role": "assistant", "content": ""}
        thoughts = [cast(Message, {**said, "reasoning_content": one}) for one, _ in spoken if one]
        lost = (answers.find_lost([one], text, self._respell, reasoning=True) for one in thoughts)
        return sum(one is not None for one in lost)

    def spelling(self, token: int) -> tuple[str, list[int]]:
        """Return a token's text and bytes; for a part of a character only the bytes are exact."""
        text = self.text([token])
        if "\ufffd" not in text:
            return text, list(text.encode())
        piece = self._tokenizer.convert_ids_to_tokens(token)  # pyright: ignore[reportAttributeAccessIssue]
        return text, [BYTES[character] for character in piece if character in BYTES]

    def _extend(
        self, prompt: list[int], sampled: list[int], new: Sequence[Message], tools: Sequence[Tool]
    ) -> list[int] | None:
        said = [*prompt, *sampled]
        bridged = self._writer.bridge(prompt, sampled, new, tools)
        if bridged is not None and bridged[: len(said)] == said:
            return bridged
        # The renderer would alter the answer. The tokens after an answer do not depend on it, so
        # they are taken from a prompt with an empty answer.
        close = self.stop_tokens[0]
        tail = self._writer.bridge([close], [close], new, tools)
        if tail is None or tail[:2] != [close, close]:
            return None
        if not self.has_ended(sampled):
            said.append(close)
        return said + tail[2:]

    def _check_whole(
        self,
        messages: Sequence[Message],
        tokens: Sequence[int],
        write: Callable[[Sequence[Message]], Sequence[int]],
    ) -> None:
        """Refuse messages if a text of theirs is not in the tokens that were rendered.

        A short text could stand there by chance, so that marks are tried in place of all texts.
        """
        text = self.text(tokens)
        lost = answers.find_lost(messages, text, self._respell)
        if lost is None and (marked := answers.mark_texts(messages)):
            lost = answers.find_lost(marked, self.text(write(marked)), self._respell)
        if lost is not None:
            message = messages[lost[0]]
            shown = f" ({message['content']:.60})" if message["content"] else ""
            raise Refused(
                400,
                f"the renderer {self.renderer} leaves out {lost[1]} of a message of the role "
                f"{message['role']}{shown}; {marks.RENDERER_REMEDY}",
            )
        for role, said in ((one["role"], one["content"]) for one in messages):
            if said.strip() not in ("", said) and self._respell(said) not in text:
                what = "leaves out white space at the ends of texts of the role"
                self._tell(role, f"the renderer {self.renderer} {what} {role}")

    def _refuse_answer(self, answer: Message, lost: answers.Lost | None) -> Refused:
        thought, _ = answers.split_thought(answer)
        remedy = "give another"
        if thought:
            remedy = "give answers without reasoning, or another"
            with suppress(NoRenderer):
                if not self.thinking and self.with_thinking(True).thinking:
                    remedy = "give model.thinking true, answers without reasoning, or another"
        what = (
            "writes other tokens before this answer than the prompt that asks for it has"
            if lost is None
            else f"leaves out {lost[1]} of this answer"
        )
        return Refused(400, f"the renderer {self.renderer} {what}; {remedy} model.renderer")

    def _respell(self, text: str) -> str:
        """Return a text as the tokenizer decodes it, which may normalise characters."""
        return self.text(self.encode_text(text))


def is_call(call: ParsedToolCall, offered: Collection[str]) -> bool:
    """Tell whether a call has a name and arguments as every API has them."""
    name: object = call.name
    try:
        check_json(call.arguments, DEEPEST_ARGUMENTS)
    except (ValueError, RecursionError):
        return False
    named = isinstance(name, str) and (name in offered or CALLED_NAME.fullmatch(name) is not None)
    return named and call.status == ToolCallParseStatus.OK and isinstance(call.arguments, dict)


def stop_string(completion: Completion, chat: Chat) -> str | None:
    """Return the client's stop string that ended an answer; None if something else did."""
    if completion.finish_reason == "length" or chat.has_ended(completion.response_token_ids):
        return None
    text = chat.decode_answer(completion.response_token_ids)
    reached = [stop for stop in completion.request.stop if stop in text]
    return min(reached, key=text.find, default=None)


def fingerprint(tokenizer: object) -> str:
    """Return 16 hexadecimal digits that change with the tokenizer.

    A tokenizer written in Python has no such text, and is told by its class and its tokens.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if hasattr(type(backend), "to_str"):
        written = backend.to_str()
    else:
        written = json.dumps([type(backend).__name__, sorted(backend.get_vocab().items())])
    return hashlib.sha256(written.encode()).hexdigest()[:16]


TEXT = "a" + 64 * " " + 64 * "\n" + 8 * "\U000f0000" + "\u00e9\u6f22b"
"""A text that a tokenizer which shortens texts, or has an unknown token, does not give back."""


def check_length(chat: Chat, messages: Sequence[Message]) -> None:
    """Refuse messages of more characters than the model's context can hold in tokens.

    The assistant's do not count, since formats leave out reasoning of an earlier turn.
    """
    longest = longest_token(chat) if chat.context is not None else 0
    if not longest or chat.context is None:
        return
    said = [message["content"].strip() for message in messages if message["role"] != "assistant"]
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
    """Return the characters of the longest token; 0 if the tokenizer shortens texts."""
    whole = chat.text(chat.encode(TEXT)).strip() == TEXT
    return max(map(len, chat.vocabulary())) if whole else 0
