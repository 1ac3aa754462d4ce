"""Values of JSON by their keys, as those of a recipe are named: `section.key`."""

from collections.abc import Container, Mapping, Sequence
from typing import TypeAlias

Json: TypeAlias = "Mapping[str, Json] | Sequence[Json] | str | float | int | bool | None"
Section: TypeAlias = Mapping[str, Json]


def find(values: Json, key: str) -> Json:
    """Return the value of a key; KeyError if there is none."""
    for part in key.split("."):
        if not isinstance(values, Mapping):
            raise KeyError(key)
        values = values[part]
    return values


def flatten(values: Section, whole: Container[str] = (), prefix: str = "") -> dict[str, Json]:
    """Map each key to its value; a mapping that is empty, or whose key is in `whole`, is one."""
    flat: dict[str, Json] = {}
    for name, value in values.items():
        key = prefix + name
        if isinstance(value, Mapping) and value and key not in whole:
            flat |= flatten(value, whole, f"{key}.")
        else:
            flat[key] = value
    return flat


def nest(key: str, value: Json) -> dict[str, Json]:
    """Return the sections of a key, with its value in the innermost."""
    section, _, last = key.rpartition(".")
    return nest(section, {last: value}) if section else {last: value}


def merge(values: Section, over: Section) -> dict[str, Json]:
    """Return the values with those of `over` in their place, section by section."""
    merged = dict(values)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            value = merge(below, value)
        merged[key] = value
    return merged
