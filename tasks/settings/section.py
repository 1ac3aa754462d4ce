"""The base class of a recipe's sections."""

from collections.abc import Iterator, Mapping
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from adapters.errors import counted
from adapters.redaction import hide, quote

Refusals = Iterator[tuple[bool, str]]
"""Rules between the keys of a section: whether each is broken, and what is then said."""

MOST_MISTAKES = 10
"""Mistakes of a recipe that a refusal says."""
MOST_STEPS = 10_000_000
MOST_ROLLOUTS = 1_000_000
"""The most rollouts of a step, and of an evaluation: more cannot be meant."""
TABLES = (
    "roles",
    "judge.criteria",
    "evaluation.roles",
    "algorithm.loss_settings",
    "algorithm.advantage_settings",
    "preference.loss_settings",
    "dataset.columns",
    "dataset.sources",
    "shared",
    "stages",
    "evaluate",
    "base",
)
"""Keys of a recipe whose entries have names of their own."""
LONGEST_SECONDS = 30 * 24 * 3600


class Section(BaseModel):
    """A part of the recipe: frozen; an unknown key, or a number that is not finite, is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    def refusals(self) -> Refusals:
        """Yield the rules in the order in which they are checked; the first broken one is said."""
        yield from ()

    def given(self, *names: str) -> str:
        """List those of the settings that are not their defaults."""
        defaults = {
            name: type(self).model_fields[name].get_default(call_default_factory=True)
            for name in names
        }
        return ", ".join(name for name in names if getattr(self, name) != defaults[name])

    @model_validator(mode="after")
    def _no_rule_is_broken(self) -> Self:
        for broken, why in self.refusals():
            if broken:
                raise ValueError(why)
        return self


def explain(error: ValidationError) -> str:
    """Say what is wrong with a recipe, and with which key; the value, unless it is a secret."""
    lines: list[str] = []
    mistakes = error.errors()
    for mistake in mistakes[:MOST_MISTAKES]:
        place, given = ".".join(["recipe", *map(str, mistake["loc"])]), mistake["input"]
        shown = "" if isinstance(given, Mapping) else f" (got {quote(given, place)})"
        said = f"{place}: {mistake['msg'].removeprefix('Value error, ')}"
        lines.append(hide(said, {place: given}, place) + shown)
    if left := len(mistakes) - len(lines):
        lines.append(f"and {counted(left, 'mistake')} more")
    return "; ".join(lines)
