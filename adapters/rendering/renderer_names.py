"""Renderers by name, as a recipe has them; the renderers themselves take seconds to import."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from adapters.errors import UserError

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
    """Return a renderer's name, or for a template one that changes with the template's text."""
    if not renderer.startswith(TEMPLATE):
        return renderer
    return TEMPLATE + hashlib.sha256(renderer.encode()).hexdigest()[:16]
