"""A renderer as its users need it: what a text spells stays text, and what it raises is refused."""

from collections.abc import Sequence
from functools import cached_property
from typing import cast

from jinja2 import TemplateError
from renderers import create_renderer
from renderers.base import ChatTemplateTokenizer, Renderer, Tokenizer

from adapters.calls import Message, Refused, Tool
from adapters.rendering.chat_template import RAISED, TemplateRenderer
from adapters.rendering.fitting import MISFITS, fitting_renderers
from adapters.rendering.marks import Marks, TextTokenizer, choose_split, spell_marks, split_marks
from adapters.rendering.probes import LOOK, named_by_id, probe_marks
from adapters.rendering.renderer_names import (
    AUTO,
    TEMPLATE,
    NoRenderer,
    find_config,
    shorten_renderer,
)
from adapters.rendering.thinking import set_thinking

CALLED = "functions."
"""Beginning of an id that names its call, as Kimi's models write them."""

REMEDY = "give another model.renderer"

MOST_QUOTED = 160
"""Letters of a renderer's own words that a refusal repeats."""


class Writer:
    """A renderer over a tokenizer, for which no text of a message is a control token."""

    def __init__(self, tokenizer: object, renderer: str, thinking: bool | None) -> None:
        self.renderer = create(tokenizer, renderer, thinking)
        self.name = shorten_renderer(renderer)
        self._tokenizer = cast(Tokenizer, tokenizer)
        self._named, self._thinking = renderer, thinking
        self._of_text: dict[str, Renderer] = {}

    def write(self, messages: Sequence[Message], tools: Sequence[Tool], *, ask: bool) -> list[int]:
        """Render messages, with the header of the next answer if that is asked for.

        Whatever the renderer or template raises refuses the messages.
        """
        renderer, said, offered = self._choose(self.name_calls(messages), tools)
        try:
            return _render(renderer, said, offered, ask)
        except RAISED as error:
            words = str(error) if isinstance(error, ValueError | TemplateError) else repr(error)
            reason = " ".join(words.split())[:MOST_QUOTED] or type(error).__name__
            text = (
                f"the renderer {self.name} takes no such messages: {reason}; mend them, or {REMEDY}"
            )
            raise Refused(400, text) from error

    def bridge(
        self, prompt: list[int], sampled: list[int], new: Sequence[Message], tools: Sequence[Tool]
    ) -> list[int] | None:
        """Render new messages behind an answer; None if the renderer cannot."""
        renderer, said, offered = self._choose(new, tools)
        try:
            bridged = renderer.bridge_to_next_turn(
                prompt,
                sampled,
                said,  # pyright: ignore[reportArgumentType]
                tools=offered or None,  # pyright: ignore[reportArgumentType]
            )
        except RAISED:
            return None
        return None if bridged is None else bridged.token_ids

    def name_calls(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return messages whose calls are named by their ids, if the format writes no other name.

        Such an id has the call's number in the conversation, as models of that format give it.
        """
        if not self._names_by_id:
            return messages
        ids: dict[str, str] = {}
        named: list[Message] = []
        for message in messages:
            calls = []
            for call in message.get("tool_calls", ()):
                given = call.get("id", "")
                known = given.startswith(CALLED)
                own = given if known else f"{CALLED}{call['function']['name']}:{len(ids)}"
                ids[given or own] = own
                calls.append({**call, "id": own})
            answered = message.get("tool_call_id")
            changed: dict[str, object] = {"tool_calls": calls} if calls else {}
            if answered in ids:
                changed["tool_call_id"] = ids[answered]
            named.append(cast(Message, {**message, **changed}))
        return named

    @cached_property
    def _names_by_id(self) -> bool:
        """The property of a format that writes a call's id in place of its name."""
        name = LOOK["function"]["name"]
        try:
            plain, by_id = (
                _render(self.renderer, named_by_id(one), [], False)
                for one in ("1", f"{CALLED}{name}:0")
            )
        except RAISED:
            return False
        return name not in self._tokenizer.decode(plain) and name in self._tokenizer.decode(by_id)

    def spells_marks(self, messages: Sequence[Message], tools: Sequence[Tool]) -> bool:
        """Tell whether a text of messages or tools spells a control token."""
        return spell_marks(messages, tools, self._marks)

    def encode_text(self, text: str) -> list[int]:
        """Encode a text in which control tokens that are written out stay text."""
        if self._marks.are_in(text):
            return self._marks.encode_text(text)
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _choose(
        self, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[Renderer, list[Message], list[Tool]]:
        """Return the renderer of messages and tools, with their control tokens split if any."""
        if not self.spells_marks(messages, tools):
            return self.renderer, [*messages], [*tools]
        split = choose_split(messages, tools)
        if split not in self._of_text:
            tokenizer = TextTokenizer(self._tokenizer, self._marks, split)
            self._of_text[split] = create(tokenizer, self._named, self._thinking)
        return self._of_text[split], *split_marks(messages, tools, self._marks, split)

    @cached_property
    def _marks(self) -> Marks:
        def write(messages: Sequence[Message], tools: Sequence[Tool], ask: bool) -> list[int]:
            try:
                return _render(self.renderer, [*messages], [*tools], ask)
            except RAISED:
                return []

        written, own = probe_marks(write)
        stops = {*self.renderer.get_stop_token_ids()}
        known = {one for one in vars(self.renderer).values() if type(one) is int}
        return Marks(self._tokenizer, written | stops | known, own - stops)


def create(tokenizer: object, renderer: str, thinking: bool | None) -> Renderer:
    """Create a renderer by its name or template; NoRenderer if it does not fit the tokenizer."""
    if renderer.startswith(TEMPLATE):
        template = renderer.removeprefix(TEMPLATE)
        return TemplateRenderer(cast(ChatTemplateTokenizer, tokenizer), template, thinking)
    config = find_config(renderer)
    if thinking is not None:
        config = set_thinking(config, thinking)
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


def _render(renderer: Renderer, messages: list[Message], tools: list[Tool], ask: bool) -> list[int]:
    return renderer.render_ids(
        messages,  # pyright: ignore[reportArgumentType]
        tools=tools or None,  # pyright: ignore[reportArgumentType]
        add_generation_prompt=ask,
    )
