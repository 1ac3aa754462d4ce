"""Values of nested JSON by dotted keys, as a recipe's: `optimizer.learning_rate`."""

from collections.abc import Container, Mapping, Sequence
from typing import TypeAlias

Json: TypeAlias = "Mapping[str, Json] | Sequence[Json] | str | float | int | bool | None"
Section: TypeAlias = Mapping[str, Json]


def find_value(values: Json, key: str) -> Json:
    """Return the value of a dotted key; KeyError if the key is not there."""
    for part in key.split("."):
        if not isinstance(values, Mapping):
            raise KeyError(key)
        values = values[part]
    return values


def flatten(values: Section, whole: Container[str] = (), prefix: str = "") -> dict[str, Json]:
    """Map each dotted key to its value: {"a": {"b": 1}} becomes {"a.b": 1}.

    A mapping that is empty, or whose key is in `whole`, is a value.
    """
    flat: dict[str, Json] = {}
    for name, value in values.items():
        key = prefix + name
        if isinstance(value, Mapping) and value and key not in whole:
            flat |= flatten(value, whole, f"{key}.")
        else:
            flat[key] = value
    return flat


def nest_value(key: str, value: Json) -> dict[str, Json]:
    """Return the sections of a key with its value: "a.b" and 1 make {"a": {"b": 1}}."""
    section, _, last = key.rpartition(".")
    return nest_value(section, {last: value}) if section else {last: value}


def merge_values(values: Section, over: Section, *, emptying: bool = False) -> dict[str, Json]:
    """Merge `over` into `values`, recursively; if `emptying`, an empty mapping takes all away."""
    merged = dict(values)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping) and (value or not emptying):
            value = merge_values(below, value, emptying=emptying)
        merged[key] = value
    return merged
