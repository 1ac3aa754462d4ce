"""Messages rendered to tokens and parsed from them, by the `renderers` package."""

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from typing import cast

from renderers import ParsedResponse, ParsedToolCall, ToolCallParseStatus, create_renderer
from renderers.base import ChatTemplateTokenizer, Renderer, Tokenizer

from adapters.calls import Completion, Message, Refused, Tool, ToolCall
from adapters.rendering.chat_template import TemplateRenderer
from adapters.rendering.fitting import MISFITS, choose_renderer, fitting_renderers
from adapters.rendering.renderer_names import (
    AUTO,
    TEMPLATE,
    NoRenderer,
    find_config,
    shorten_renderer,
)

log = logging.getLogger(__name__)

UNLIMITED = 10**9
"""Any `model_max_length` from here on is no limit: tokenizers that know of none say 10^30."""

FOLLOWING: Message = {"role": "user", "content": "What else?"}
"""Message after an answer in the middle of a conversation."""

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

    def __init__(self, tokenizer: object, renderer: str = AUTO, context: int | None = None) -> None:
        chosen = choose_renderer(tokenizer) if renderer == AUTO else renderer
        self._renderer = _create(tokenizer, chosen)
        self._tokenizer = cast(Tokenizer, tokenizer)
        self.renderer = shorten_renderer(chosen)
        self.tokenizer_sha = fingerprint(tokenizer)
        self.stop_tokens = list(self._renderer.get_stop_token_ids())
        self.read_context = _declared_context(tokenizer)
        """The longest text that the model has read, if its tokenizer says so."""
        self.context = context or self.read_context
        self.model = str(getattr(tokenizer, "name_or_path", "") or "the model")
        self._told_of_noise = False

    def tell_of_noise(self, prompt: int) -> None:
        """Warn, once, of a prompt of so many tokens if it is longer than what the model has read.

        A service that serves the model beyond that says nothing of it.
        """
        if self.read_context is not None and prompt > self.read_context and not self._told_of_noise:
            self._told_of_noise = True
            text = "a prompt of %d tokens is beyond the %d that %s has read; its answers are noise"
            log.warning(text, prompt, self.read_context, self.model)

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Render the prompt, which ends with the header of the answer."""
        return self._render(messages, tools, ask=True)

    def extend(
        self,
        prompt: Sequence[int],
        sampled: Sequence[int],
        new: Sequence[Message],
        tools: Sequence[Tool],
    ) -> list[int] | None:
        """Render the next prompt, which begins with exactly `prompt` and `sampled`.

        An answer that was cut short is closed first. The new messages are rendered by themselves,
        so none of the model's tokens is encoded anew. Return None if the renderer cannot do this.
        """
        said = [*prompt, *sampled]
        bridged = self._bridge(list(prompt), list(sampled), new, tools)
        if bridged is not None and bridged[: len(said)] == said:
            return bridged
        # The renderer would alter the answer. The tokens after an answer do not depend on it, so
        # they are taken from a prompt with an empty answer.
        close = self.stop_tokens[0]
        tail = self._bridge([close], [close], new, tools)
        if tail is None or tail[:2] != [close, close]:
            return None
        if not self.has_ended(sampled):
            said.append(close)
        return said + tail[2:]

    def answer(
        self, messages: Sequence[Message], answer: Message, tools: Sequence[Tool]
    ) -> list[int]:
        """Return the tokens that a model samples to give an answer to messages, its end included.

        An answer without reasoning is written as in the middle of a conversation, since templates
        write an empty thought into the last one. Refused if the renderer writes it behind other
        tokens than those of the prompt that asks for it.
        """
        prompt, said = self.render(messages, tools), [*messages, answer]
        thinks = answer.get("reasoning_content") or "</think>" in answer["content"]
        conversations = [said] if thinks else [[*said, FOLLOWING], said]
        written = (self._render(one, tools, ask=False) for one in conversations)
        whole = next((tokens for tokens in written if tokens[: len(prompt)] == prompt), None)
        if whole is None:
            raise Refused(
                400,
                f"the renderer {self.renderer} writes this answer behind other tokens than those "
                "of the prompt that asks for it; give another model.renderer",
            )
        tokens = whole[len(prompt) :]
        end = next((at for at, token in enumerate(tokens) if token in self.stop_tokens), None)
        return [*tokens, self.stop_tokens[0]] if end is None else tokens[: end + 1]

    def has_ended(self, sampled: Sequence[int]) -> bool:
        """Tell whether the model ended its turn itself."""
        return bool(sampled) and sampled[-1] in self.stop_tokens

    def parse(self, sampled: Sequence[int], *, with_tools: bool) -> Message:
        """Parse the assistant's message, whose tool calls have no ids yet.

        If a tool call is malformed, or `with_tools` is false, the whole answer is plain content.
        """
        parsed = self._renderer.parse_response(list(sampled))
        if parsed.tool_calls and not (with_tools and _well_formed(parsed)):
            return {"role": "assistant", "content": self.decode_answer(sampled)}
        message: Message = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning_content:
            message["reasoning_content"] = parsed.reasoning_content
        if parsed.tool_calls:
            message["tool_calls"] = [_tool_call(call) for call in parsed.tool_calls]
        return message

    def text(self, tokens: Sequence[int]) -> str:
        """Decode tokens, special ones included."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False) if tokens else ""

    def decode_answer(self, sampled: Sequence[int]) -> str:
        """Decode an answer without the token that ended it."""
        return self.text(sampled[:-1] if self.has_ended(sampled) else sampled)

    def encode(self, text: str) -> list[int]:
        """Encode a text; special tokens that are written out in it become special tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def vocabulary(self) -> Iterable[str]:
        """Return the tokens as their tokenizer has them, a byte or a character a letter."""
        return self._tokenizer.get_vocab()  # pyright: ignore[reportAttributeAccessIssue]

    def spelling(self, token: int) -> tuple[str, list[int]]:
        """Return a token's text and bytes; for a part of a character only the bytes are exact."""
        text = self.text([token])
        if "\ufffd" not in text:
            return text, list(text.encode())
        piece = self._tokenizer.convert_ids_to_tokens(token)  # pyright: ignore[reportAttributeAccessIssue]
        return text, [BYTES[character] for character in piece if character in BYTES]

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Tool], *, ask: bool
    ) -> list[int]:
        return self._renderer.render_ids(
            list(messages),  # pyright: ignore[reportArgumentType]
            tools=list(tools) or None,  # pyright: ignore[reportArgumentType]
            add_generation_prompt=ask,
        )

    def _bridge(
        self, prompt: list[int], sampled: list[int], new: Sequence[Message], tools: Sequence[Tool]
    ) -> list[int] | None:
        bridged = self._renderer.bridge_to_next_turn(
            prompt,
            sampled,
            list(new),  # pyright: ignore[reportArgumentType]
            tools=list(tools) or None,  # pyright: ignore[reportArgumentType]
        )
        return None if bridged is None else bridged.token_ids


def _create(tokenizer: object, renderer: str) -> Renderer:
    if renderer.startswith(TEMPLATE):
        template = renderer.removeprefix(TEMPLATE)
        return TemplateRenderer(cast(ChatTemplateTokenizer, tokenizer), template)
    config = find_config(renderer)
    # An answer stays in the history as it was sampled, its reasoning included: a template
    # that strips reasoning would break the tokens of every turn but the last.
    keeping = config.model_copy(update={"thinking_retention": "all"})
    try:
        return create_renderer(tokenizer, keeping)  # pyright: ignore[reportArgumentType]
    except MISFITS as error:
        others = fitting_renderers(tokenizer)
        listed = f", or one that does: {', '.join(others)}" if others else ""
        raise NoRenderer(
            f"the renderer {renderer!r} does not fit the model ({error}); give model.renderer "
            f"{AUTO}{listed}"
        ) from error


def stop_string(completion: Completion, chat: Chat) -> str | None:
    """Return the client's stop string that ended an answer; None if something else did."""
    if completion.finish_reason == "length" or chat.has_ended(completion.response_token_ids):
        return None
    text = chat.decode_answer(completion.response_token_ids)
    reached = [stop for stop in completion.request.stop if stop in text]
    return min(reached, key=text.find, default=None)


def fingerprint(tokenizer: object) -> str:
    """Return 16 hexadecimal digits that change with the tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    written = backend.to_str()  # pyright: ignore[reportAttributeAccessIssue]
    return hashlib.sha256(written.encode()).hexdigest()[:16]


def _well_formed(parsed: ParsedResponse) -> bool:
    return all(
        call.status == ToolCallParseStatus.OK and isinstance(call.arguments, dict)
        for call in parsed.tool_calls
    )


def _tool_call(call: ParsedToolCall) -> ToolCall:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"type": "function", "function": {"name": call.name or "", "arguments": arguments}}


def _declared_context(tokenizer: object) -> int | None:
    declared = getattr(tokenizer, "model_max_length", None)
    return declared if type(declared) is int and declared < UNLIMITED else None
