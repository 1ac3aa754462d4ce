"""messages ⇄ tokens, by the `renderers` package."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from renderers import (
    ParsedResponse,
    ParsedToolCall,
    ToolCallParseStatus,
    config_from_name,
    create_renderer,
)
from renderers.base import Tokenizer

from adapters.calls import Completion, Message

UNLIMITED = 10**9
"""Tokenizers that know of no limit say 10^30."""

PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTES = {chr(byte): byte for byte in PRINTABLE} | {
    chr(0x100 + i): byte for i, byte in enumerate(sorted({*range(0x100)} - {*PRINTABLE}))
}
"""The alphabet in which byte-level tokenizers write bytes (GPT-2's bytes_to_unicode)."""

Tools = Sequence[dict[str, Any]]


class Chat:
    """One model's chat format, by its Hugging Face tokenizer and the name of a renderer.

    `context` is the most tokens a prompt and its answer may have together.
    """

    def __init__(self, tokenizer: Any, renderer: str = "qwen3", context: int | None = None) -> None:
        config = config_from_name(renderer)
        # An answer stays in the history as it was sampled, its reasoning included: a template
        # that strips reasoning would break the tokens of every turn but the last.
        keeping = config and config.model_copy(update={"thinking_retention": "all"})
        self._renderer = create_renderer(tokenizer, keeping)  # pyright: ignore[reportArgumentType]
        self._tokenizer: Tokenizer = tokenizer
        self.renderer = renderer
        self.tokenizer_sha = fingerprint(tokenizer)
        self.stop_tokens = list(self._renderer.get_stop_token_ids())
        self.context = context or _declared_context(tokenizer)

    def render(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """The prompt, with the header of the answer to come."""
        return self._renderer.render_ids(
            list(messages),  # pyright: ignore[reportArgumentType]
            tools=list(tools) or None,  # pyright: ignore[reportArgumentType]
            add_generation_prompt=True,
        )

    def extend(
        self, prompt: Sequence[int], sampled: Sequence[int], new: Sequence[Message], tools: Tools
    ) -> list[int] | None:
        """The next prompt, beginning with exactly `prompt` and `sampled`; None if that cannot be.

        An answer that was cut short is closed first. The new messages are rendered by themselves,
        so none of the model's tokens is encoded anew.
        """
        said = [*prompt, *sampled]
        bridged = self._bridge(list(prompt), list(sampled), new, tools)
        if bridged is not None and bridged[: len(said)] == said:
            return bridged
        # The renderer would have altered the answer. Its tail does not depend on the answer, so it
        # is taken from an empty one.
        close = self.stop_tokens[0]
        tail = self._bridge([close], [close], new, tools)
        if tail is None or tail[:2] != [close, close]:
            return None
        if not self.ended(sampled):
            said.append(close)
        return said + tail[2:]

    def ended(self, sampled: Sequence[int]) -> bool:
        """Whether the model ended its turn itself."""
        return bool(sampled) and sampled[-1] in self.stop_tokens

    def parse(self, sampled: Sequence[int], *, with_tools: bool) -> Message:
        """The assistant's message; its tool calls have no ids yet.

        Where a tool call is malformed, or none was asked for, the whole answer is plain content.
        """
        parsed = self._renderer.parse_response(list(sampled))
        if parsed.tool_calls and not (with_tools and _well_formed(parsed)):
            return {"role": "assistant", "content": self.text(self._said(sampled))}
        message: Message = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning_content:
            message["reasoning_content"] = parsed.reasoning_content
        if parsed.tool_calls:
            message["tool_calls"] = [_tool_call(call) for call in parsed.tool_calls]
        return message

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False) if tokens else ""

    def said_text(self, sampled: Sequence[int]) -> str:
        """The text of an answer, without the token that ended it."""
        return self.text(self._said(sampled))

    def encode(self, text: str) -> list[int]:
        """The canonical tokens of a text; special tokens that are spelt out in it are special."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def spelling(self, token: int) -> tuple[str, list[int]]:
        """A token's text and its bytes; of part of a character, only the bytes are exact."""
        text = self.text([token])
        if "\ufffd" not in text:
            return text, list(text.encode())
        piece = self._tokenizer.convert_ids_to_tokens(token)  # pyright: ignore[reportAttributeAccessIssue]
        return text, [BYTES[character] for character in piece if character in BYTES]

    def _said(self, sampled: Sequence[int]) -> Sequence[int]:
        return sampled[:-1] if self.ended(sampled) else sampled

    def _bridge(
        self, prompt: list[int], sampled: list[int], new: Sequence[Message], tools: Tools
    ) -> list[int] | None:
        bridged = self._renderer.bridge_to_next_turn(
            prompt,
            sampled,
            list(new),  # pyright: ignore[reportArgumentType]
            tools=list(tools) or None,  # pyright: ignore[reportArgumentType]
        )
        return None if bridged is None else bridged.token_ids


def stop_string(completion: Completion, chat: Chat) -> str | None:
    """The client's stop string that ended an answer; None if something else did."""
    if completion.finish_reason == "length" or chat.ended(completion.sampled_tokens):
        return None
    text = chat.said_text(completion.sampled_tokens)
    reached = [stop for stop in completion.request.stop if stop in text]
    return min(reached, key=text.find, default=None)


def fingerprint(tokenizer: Any) -> str:
    """16 hex digits that change with the tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    return hashlib.sha256(backend.to_str().encode()).hexdigest()[:16]


def _well_formed(parsed: ParsedResponse) -> bool:
    return all(
        call.status == ToolCallParseStatus.OK and isinstance(call.arguments, dict)
        for call in parsed.tool_calls
    )


def _tool_call(call: ParsedToolCall) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"type": "function", "function": {"name": call.name, "arguments": arguments}}


def _declared_context(tokenizer: Any) -> int | None:
    declared = getattr(tokenizer, "model_max_length", None)
    return declared if isinstance(declared, int) and declared < UNLIMITED else None
