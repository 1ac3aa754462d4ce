"""Rows of the tables of losses and of advantages, by name, and the settings that a row reads."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import TypeVar

Settings = Mapping[str, float | str]

Row = TypeVar("Row")


@dataclass(frozen=True)
class Number:
    """A number: its default, and the bounds that it lies within, both included.

    `used_by` is the setting, and those of its values, without which the number has no effect.
    """

    default: float
    least: float = -inf
    most: float = inf
    used_by: tuple[str, tuple[str, ...]] | None = None

    def admits(self, value: float | str) -> bool:
        """Return whether a value is a number within the bounds."""
        return not isinstance(value, str) and self.least <= value <= self.most

    def __str__(self) -> str:
        return f"a number from {self.least:g} to {self.most:g}"


@dataclass(frozen=True)
class Option:
    """One of several names, and the one that is the default."""

    default: str
    names: tuple[str, ...]

    def admits(self, value: float | str) -> bool:
        """Return whether a value is one of the names."""
        return value in self.names

    def __str__(self) -> str:
        return f"one of {', '.join(self.names)}"


Known = Mapping[str, Number | Option]


def find_row(kind: str, name: str, table: Mapping[str, Row], refused: Mapping[str, str]) -> Row:
    """Return the row of that name in the table of a kind, such as loss.

    ValueError if there is none; `refused` says why not for names that the field knows.
    """
    if name in refused:
        raise ValueError(f"the {kind} {name} {refused[name]}")
    if name not in table:
        raise ValueError(f"no {kind} '{name}' (there is: {', '.join(table)})")
    return table[name]


def complete_settings(owner: str, given: Settings, known: Known) -> dict[str, float | str]:
    """Return the given settings and the defaults of the others.

    ValueError if the owner (in words, as 'the loss ppo') would ignore a setting, or if a setting
    is not what the owner reads.
    """
    complete = {name: given.get(name, setting.default) for name, setting in known.items()}
    ignored = sorted(name for name in given if not _is_used(name, known, complete))
    if ignored:
        names = ", ".join(name for name in known if _is_used(name, known, complete)) or "none"
        raise ValueError(
            f"{owner} would ignore {', '.join(ignored)} (it reads: {names}); "
            "remove them or choose another one"
        )
    for name, value in given.items():
        if not known[name].admits(value):
            raise ValueError(f"{owner} needs {known[name]} as its {name}, not {value!r}")
    return complete


def used_settings(given: Settings, known: Known) -> dict[str, float | str]:
    """Return those of the given settings that have an effect beside the others."""
    complete = {name: given.get(name, setting.default) for name, setting in known.items()}
    return {name: value for name, value in given.items() if _is_used(name, known, complete)}


def _is_used(name: str, known: Known, settings: Settings) -> bool:
    """Return whether a setting has an effect beside the others."""
    setting = known.get(name)
    if not isinstance(setting, Number) or setting.used_by is None:
        return setting is not None
    other, values = setting.used_by
    return settings[other] in values
