"""Whether a model is asked to think before it answers, as its renderer or template has it."""

from typing import TYPE_CHECKING, Any

from adapters.rendering.renderer_names import NoRenderer

if TYPE_CHECKING:
    from renderers.configs import BaseRendererConfig

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
    """Return the refusal of a renderer or template in which thinking is as it is."""
    return NoRenderer(
        f"{what} cannot turn thinking {'on' if thinking else 'off'}; leave model.thinking out, or "
        "give another model.renderer"
    )
