"""Which renderers write conversations as a model's own chat template does."""

from typing import cast, get_args

from renderers import RendererConfig, config_from_name, create_renderer
from renderers.base import MODEL_RENDERER_MAP, ChatTemplateTokenizer, Message, ToolSpec

from adapters.rendering.chat_template import RAISED
from adapters.rendering.renderer_names import TEMPLATE, NoRenderer

ASKED: Message = {"role": "user", "content": "What is 7 + 5?"}
ADD = {"name": "add", "description": "Add.", "parameters": {"type": "object"}}
PROBES: tuple[tuple[list[Message], list[ToolSpec] | None], ...] = (
    ([ASKED], None),
    ([{"role": "system", "content": "Be brief."}, ASKED], None),
    ([ASKED, {"role": "assistant", "content": "12"}, ASKED], None),
    ([ASKED], [cast(ToolSpec, {"type": "function", "function": ADD})]),
)
"""Conversations by which a renderer is compared with a template, and the tools that they offer."""

MISFITS = (AssertionError, ValueError)
"""What renderers raise for a tokenizer that lacks their special tokens."""

NEVER_CHOSEN = ("auto", "default", "custom", "gpt-oss")
"""Names of no format of their own, and one whose tokens are downloaded."""


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
    """Return a tokenizer's template, or the names of its templates if none of them is for chats.

    Of several, transformers takes the one for tools where tools are offered, and so does theirs.
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
    return [name for name in _names() if _write_probes(tokenizer, name, expected)]


def _names() -> list[str]:
    configs = get_args(get_args(RendererConfig)[0])
    names = sorted(config.model_fields["name"].default for config in configs)
    return [name for name in names if name not in NEVER_CHOSEN]


def _by_template(
    tokenizer: object, messages: list[Message], tools: list[ToolSpec] | None
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
        renderer = create_renderer(tokenizer, config_from_name(name))  # pyright: ignore[reportArgumentType]
        return all(
            renderer.render_ids(messages, tools=tools, add_generation_prompt=True) == tokens
            for (messages, tools), tokens in zip(PROBES, expected, strict=True)
            if tokens
        )
    except MISFITS:
        return False
