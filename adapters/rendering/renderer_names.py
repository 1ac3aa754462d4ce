"""Renderers by name, as a recipe has them, and whether they have a model think before it answers.

The renderers themselves take seconds to import.
"""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratchet.adapters.errors import UserError

if TYPE_CHECKING:
    from renderers.configs import BaseRendererConfig


AUTO = "auto"
"""Renderer that is chosen by the model."""

TEMPLATE = "jinja:"
"""Prefix of a renderer that is a template's text."""


class NoRenderer(UserError):
    """An error for a name that no renderer has."""


def find_config(renderer: str) -> "BaseRendererConfig":
    """Return the configuration of a renderer by its name; NoRenderer if none has it."""
    from renderers import config_from_name

    try:
        config = config_from_name(renderer)
    except ValueError as error:
        known = str(error).partition("Known: ")[2].strip("[]").replace("'", "")
        raise NoRenderer(
            f"there is no renderer {renderer!r}; give model.renderer one of: {known}; or "
            f"{TEMPLATE} and a chat template"
        ) from error
    assert config is not None  # which `auto` alone has
    return config


def resolve_renderer(renderer: str) -> str:
    """Return a renderer with the text of its template in place of the template's file.

    A template has braces or line ends, and the name of a file has neither.
    """
    named = renderer.removeprefix(TEMPLATE)
    if named == renderer or any(mark in named for mark in ("{", "\n")):
        return renderer
    path = Path(named)
    if not path.is_file():
        raise ValueError(
            f"the chat template {named!r} is neither a file nor a Jinja template; give "
            f"{TEMPLATE} and the path of a file, or the template's text"
        )
    return TEMPLATE + path.read_text(encoding="utf-8")


def shorten_renderer(renderer: str) -> str:
    """Return a renderer's name, or for a template a name that changes with the template's text."""
    if not renderer.startswith(TEMPLATE):
        return renderer
    return TEMPLATE + hashlib.sha256(renderer.encode()).hexdigest()[:16]


SWITCHES = ("enable_thinking", "thinking")
"""Names by which renderers and templates have a switch."""

EFFORTS = {"hy3": ("no_think", "high"), "inkling": ("none", "high")}
"""Renderers that are told how much to think: nothing, and the usual."""


def set_thinking(config: "BaseRendererConfig", thinking: bool) -> "BaseRendererConfig":
    """Return a renderer's configuration with thinking on or off; NoRenderer if it has no switch."""
    name = str(type(config).model_fields["name"].default)
    fields = type(config).template_field_names()
    update: dict[str, Any] = {switch: thinking for switch in SWITCHES if switch in fields}
    if not update and name in EFFORTS:
        update = {"reasoning_effort": EFFORTS[name][thinking]}
    if not update:
        raise no_switch(f"the renderer {name}", thinking)
    return config.model_copy(update=update)


def no_switch(what: str, thinking: bool) -> NoRenderer:
    """Return the refusal of a renderer or template that cannot switch thinking."""
    return NoRenderer(
        f"{what} cannot turn thinking {'on' if thinking else 'off'}; leave model.thinking out, or "
        "give another model.renderer"
    )
