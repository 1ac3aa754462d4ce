"""Rows of the tables of losses and of advantages, by name, and the settings that a row reads."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from types import MappingProxyType
from typing import TypeVar

from ratchet.adapters.errors import did_you_mean

Settings = Mapping[str, float | str]

UsedBy = tuple[str, tuple[str, ...]] | None
"""(setting, values): a row reads this one only if that setting has one of the values.

None: a row always reads it. `("clip", ("ring",))` belongs to a setting of ring clipping alone.
"""

TableRow = TypeVar("TableRow")


@dataclass(frozen=True)
class Number:
    """A number: its default, and the bounds that it lies within, both included."""

    default: float
    least: float = -inf
    most: float = inf
    used_by: UsedBy = None

    def admits(self, value: float | str) -> bool:
        return not isinstance(value, str) and self.least <= value <= self.most

    def __str__(self) -> str:
        return f"a number from {self.least:g} to {self.most:g}"


@dataclass(frozen=True)
class Option:
    """Choice between names, with the name that is the default."""

    default: str
    names: tuple[str, ...]
    used_by: UsedBy = None

    def admits(self, value: float | str) -> bool:
        return value in self.names

    def __str__(self) -> str:
        return f"one of {', '.join(self.names)}"


Known = Mapping[str, Number | Option]
ANY: Known = MappingProxyType({})
"""Settings of a row that reads whichever are given."""


def find_row(kind: str, name: str, table: Mapping[str, TableRow]) -> TableRow:
    """Return the row of a name in a table of a kind, such as loss; ValueError if it has none."""
    if name not in table:
        near = did_you_mean(name, table)
        raise ValueError(f"no {kind} '{name}' (there is: {', '.join(table)}){near}")
    return table[name]


def complete_settings(owner: str, given: Settings, known: Known) -> dict[str, float | str]:
    """Return the given settings and the defaults of the others.

    ValueError if the owner (in words, as 'the loss ppo') does not read a setting, or admits another
    value.
    """
    complete, read = _complete(given, known)
    if ignored := sorted(given.keys() - read):
        raise ValueError(
            f"{owner} would ignore {', '.join(ignored)} (it reads: {', '.join(read) or 'none'}); "
            "remove them or choose another one"
        )
    for name, value in given.items():
        if known is not ANY and not known[name].admits(value):
            raise ValueError(f"{owner} needs {known[name]} as its {name}, not {value!r}")
    return complete


def used_settings(given: Settings, known: Known) -> dict[str, float | str]:
    """Return the given settings that the row reads."""
    _, read = _complete(given, known)
    return {name: value for name, value in given.items() if name in read}


def _complete(given: Settings, known: Known) -> tuple[dict[str, float | str], list[str]]:
    """Add the defaults to the given settings; return also the names that the row reads."""
    if known is ANY:
        return {**given}, [*given]
    complete = {name: given.get(name, setting.default) for name, setting in known.items()}
    return complete, [
        name
        for name, setting in known.items()
        if setting.used_by is None or complete[setting.used_by[0]] in setting.used_by[1]
    ]
