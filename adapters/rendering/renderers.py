"""Renderers: one by its name, a chat template as another, and which of them fits a model."""

from collections.abc import Sequence
from typing import Any, cast, get_args

import renderers
from jinja2 import TemplateError
from renderers import DefaultRendererConfig, RendererConfig, config_from_name
from renderers.base import (
    MODEL_RENDERER_MAP,
    ChatTemplateTokenizer,
    RenderedTokens,
    Renderer,
    ToolSpec,
)
from renderers.base import Message as RenderedMessage
from renderers.default import DefaultRenderer

from ratchet.adapters.errors import UserError
from ratchet.adapters.rendering.renderer_names import (
    AUTO,
    SWITCHES,
    TEMPLATE,
    NoRenderer,
    find_config,
    no_switch,
    set_thinking,
)

WITHOUT_CLOCK = "{% set strftime_now = undefined +%}"
"""Beginning of a template for which the date is not defined, although transformers defines it."""

RAISED = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TemplateError),
    *(TypeError, ValueError),
)
"""What renderers and templates raise for messages that they cannot write."""

ASKED = "What is asked?"
ANSWERED = "This is answered."


class TemplateRenderer(DefaultRenderer):
    """Renderer of a Jinja template over a model's tokenizer.

    Tool calls in an answer stay text, since a template does not say how they are written. The
    template is told no date, so that a run is the same on another day. If what follows an answer
    depends only on the messages after it, a conversation is continued with its tokens unchanged.
    """

    def __init__(
        self, tokenizer: ChatTemplateTokenizer, template: str, thinking: bool | None = None
    ) -> None:
        config: dict[str, Any] = {"chat_template": WITHOUT_CLOCK + template}
        if thinking is not None:
            config |= dict.fromkeys(SWITCHES, thinking)
        super().__init__(tokenizer, DefaultRendererConfig(**config))
        asked: list[RenderedMessage] = [{"role": "user", "content": ASKED}]
        try:
            following = [self._following(history, asked, None) for history in (0, 1)]
            closing = self._following(0, [], None)
        except RAISED as error:
            raise UserError(
                f"the chat template cannot be rendered ({error}); mend it, or give "
                "model.renderer the name of a renderer"
            ) from error
        if thinking is not None and self._asks(thinking) == self._asks(not thinking):
            raise no_switch("the chat template", thinking)
        self._is_local = None not in following and len(set(following)) == 1
        self._stop_tokens = _stop_tokens(tokenizer, closing or "")

    def get_stop_token_ids(self) -> list[int]:
        """Return the token by which the template closes an answer, and the tokenizer's own."""
        return self._stop_tokens

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[RenderedMessage],
        *,
        tools: list[ToolSpec] | None = None,
    ) -> RenderedTokens | None:
        """Continue a conversation by the text that the template writes after an answer."""
        following = self._following(0, new_messages, tools) if self._is_local else None
        if following is None:
            return None
        last = previous_completion_ids[-1:]
        if last and last[0] in self._stop_tokens:
            following = following.removeprefix(self._tokenizer.decode(last))
        tokens = [
            *previous_prompt_ids,
            *previous_completion_ids,
            *self._tokenizer.encode(following, add_special_tokens=False),
        ]
        return RenderedTokens(token_ids=tokens, message_indices=[-1] * len(tokens))

    def _asks(self, thinking: bool) -> str:
        """Return the prompt of a question with thinking on or off."""
        options = {**(self.config.model_extra or {}), **dict.fromkeys(SWITCHES, thinking)}
        asked: list[RenderedMessage] = [{"role": "user", "content": ASKED}]
        text = self._tokenizer.apply_chat_template(
            asked, tokenize=False, add_generation_prompt=True, **options
        )
        return cast(str, text)

    def _following(
        self, history: int, new: Sequence[RenderedMessage], tools: list[ToolSpec] | None
    ) -> str | None:
        """Return the text between an answer and the next one; None if the answer is altered.

        The answer comes after `history` earlier ones; without new messages, it is the last.
        """
        turn: list[RenderedMessage] = [{"role": "user", "content": ASKED}]
        earlier: list[RenderedMessage] = [*turn, {"role": "assistant", "content": ASKED}]
        answer: RenderedMessage = {"role": "assistant", "content": ANSWERED}
        text = self._tokenizer.apply_chat_template(
            [*earlier * history, *turn, answer, *new],
            tokenize=False,
            add_generation_prompt=bool(new),
            **({"tools": tools} if tools else {}),
            **(self.config.model_extra or {}),
        )
        _, found, following = cast(str, text).rpartition(ANSWERED)
        return following if found else None


def _stop_tokens(tokenizer: ChatTemplateTokenizer, closing: str) -> list[int]:
    """Return the special token that begins the closing text, and the end of the tokenizer's texts.

    A closing text that begins with no special token ends no answer.
    """
    special = set(tokenizer.all_special_ids)  # pyright: ignore[reportAttributeAccessIssue]
    first = tokenizer.encode(closing, add_special_tokens=False)[:1]
    ends = [token for token in [*first, tokenizer.eos_token_id] if token in special]
    if not ends:
        raise UserError(
            f"the chat template closes an answer by {closing!r}, which is no special token of the "
            "tokenizer, and the tokenizer has no end of text, so that no answer would end; give a "
            "template of this model"
        )
    return list(dict.fromkeys(ends))


SUM: RenderedMessage = {"role": "user", "content": "What is 7 + 5?"}
ADD = {"name": "add", "description": "Add.", "parameters": {"type": "object"}}
PROBES: tuple[tuple[list[RenderedMessage], list[ToolSpec] | None], ...] = (
    ([SUM], None),
    ([{"role": "system", "content": "Be brief."}, SUM], None),
    ([SUM, {"role": "assistant", "content": "12"}, SUM], None),
    ([SUM], [cast(ToolSpec, {"type": "function", "function": ADD})]),
)
"""Conversations by which a renderer is compared with a template, and the tools that they offer."""

MISFITS = (AssertionError, ValueError)
"""What renderers raise for a tokenizer that lacks their special tokens."""

NEVER_CHOSEN = ("auto", "default", "custom", "gpt-oss")
"""Names without a format of their own, and a format whose tokens are downloaded."""


def choose_renderer(tokenizer: object) -> str:
    """Return the name of the renderer that fits the model, else the model's own chat template.

    NoRenderer if the model has no template.
    """
    name = str(getattr(tokenizer, "name_or_path", ""))
    if name in MODEL_RENDERER_MAP:
        return MODEL_RENDERER_MAP[name]
    template = _own_template(getattr(tokenizer, "chat_template", None))
    if not isinstance(template, str):
        named = f", only ones named {', '.join(map(repr, template))}" if template else ""
        raise NoRenderer(
            f"{name or 'the model'} has no chat template{named}; give model.renderer {TEMPLATE} "
            "and a file with one, or the name of a renderer"
        )
    return next(iter(fitting_renderers(tokenizer)), TEMPLATE + template)


def _own_template(written: object) -> str | list[str]:
    """Return a tokenizer's template, or the names of its templates if no template is for chats.

    Where tools are offered, transformers takes the template for tools, and so does the joined one.
    """
    if isinstance(written, str) and written:
        return written
    named = cast(dict[str, str], written) if isinstance(written, dict) else {}
    plain, tools = (named.get(name) for name in ("default", "tool_use"))
    if plain is None or tools in (None, plain):
        return plain or sorted(named)
    # Jinja leaves out a line end behind a block, and one at the end of a template.
    written = [f"{{{{ '' }}}}{text.removesuffix(chr(10))}" for text in (tools, plain)]
    return f"{{% if tools %}}{written[0]}{{% else %}}{written[1]}{{% endif %}}"


def fitting_renderers(tokenizer: object) -> list[str]:
    """List the named renderers that write every probe as the model's own template does."""
    expected = [_by_template(tokenizer, *probe) for probe in PROBES]
    if not any(expected):
        return []
    configs = get_args(get_args(RendererConfig)[0])
    names = {*(config.model_fields["name"].default for config in configs)} - {*NEVER_CHOSEN}
    return [name for name in sorted(names) if _write_probes(tokenizer, name, expected)]


def _by_template(
    tokenizer: object, messages: list[RenderedMessage], tools: list[ToolSpec] | None
) -> list[int]:
    """Render a probe by the model's own template; empty if that refuses it."""
    try:
        written = cast(ChatTemplateTokenizer, tokenizer).apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, return_dict=False
        )
    except RAISED:
        return []
    return cast(list[int], written)


def _write_probes(tokenizer: object, name: str, expected: list[list[int]]) -> bool:
    try:
        renderer = renderers.create_renderer(tokenizer, config_from_name(name))  # pyright: ignore[reportArgumentType]
        return all(
            renderer.render_ids(messages, tools=tools, add_generation_prompt=True) == tokens
            for (messages, tools), tokens in zip(PROBES, expected, strict=True)
            if tokens
        )
    except MISFITS:
        return False


def create_renderer(tokenizer: object, renderer: str, thinking: bool | None) -> Renderer:
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
        return renderers.create_renderer(tokenizer, keeping)  # pyright: ignore[reportArgumentType]
    except MISFITS as error:
        others = fitting_renderers(tokenizer)
        listed = f", or one that does: {', '.join(others)}" if others else ""
        raise NoRenderer(
            f"the renderer {renderer!r} does not fit the model ({error}); give model.renderer "
            f"{AUTO}{listed}"
        ) from error
