"""A configuration of Trinity-RFT 0.6.0 as it is read: every key is known, every value resolved."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import yaml

from adapters.errors import UserError
from tasks.storage.files import read_bytes
from tasks.storage.keys import Json, Section

VERSION = "Trinity-RFT 0.6.0"
ENVIRONMENT = re.compile(r"oc\.env:\s*([A-Za-z_]\w*)\s*(?:,(.*))?", re.DOTALL)
INTERPOLATION = re.compile(r"\$\{([^{}]*)\}")


class ImportRefusal(UserError):
    """Refusal of a file that no recipe says."""


@dataclass(frozen=True)
class Keys:
    """Keys of a configuration: those with a counterpart, and the effects of the others.

    `off` maps a refused key to the values that do nothing.
    """

    defaults: Section
    off: Mapping[str, tuple[Json, ...]]
    effects: Mapping[str, str]

    def __contains__(self, key: object) -> bool:
        return key in self.defaults or key in self.effects


@dataclass(frozen=True)
class TrinityFile:
    """The values of a file, by their whole keys, such as `buffer.batch_size`."""

    given: Section

    def get(self, key: str) -> Any:
        """Return the value of a translated key, or Trinity's default."""
        return self.given.get(key, known_keys().defaults[key])

    def number(self, key: str) -> float:
        value = self.get(key)
        try:
            return float(value)
        except (TypeError, ValueError) as error:
            raise ImportRefusal(f"{key} is {value!r}, and should be a number") from error

    def first(self, *keys: str) -> str:
        """Return the first of the keys that has a value, or else the last."""
        return next((key for key in keys if self.get(key) is not None), keys[-1])

    def reason(self, key: str) -> str:
        """Say where the value of a key comes from."""
        return key if key in self.given else f"Trinity's default of {key}"


@cache
def known_keys() -> Keys:
    table = yaml.safe_load(read_bytes(Path(__file__).parent / "trinity.yaml"))
    whole = {
        f"{section}.*": [f"{section}.{key}" for key in keys.split()]
        for section, keys in table["sections"].items()
    }
    effects = {
        key: row["effect"]
        for row in (*table["untranslated"], *table["refused"])
        for named in row["keys"]
        for key in whole.get(named, [named])
    }
    off = {
        key: (None, *row.get("off", ([], {}))) for row in table["refused"] for key in row["keys"]
    }
    return Keys(table["translated"] | table["given"], off, effects)


def read_trinity(name: str, text: str) -> TrinityFile:
    """Read a file's text; ImportRefusal if a key is unknown or a value cannot be resolved."""
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ImportRefusal(f"{name} is no YAML: {error}") from error
    if not isinstance(values, Mapping):
        raise ImportRefusal(f"{name} has no keys; give a configuration of {VERSION}")
    found = [*_flatten(cast(Section, values))]
    unknown = [key for key, _ in found if key not in known_keys()]
    if unknown:
        raise ImportRefusal(
            f"{name} has keys that are unknown to {VERSION}: {', '.join(unknown)}; correct or "
            "remove them"
        )
    return TrinityFile({key: _resolved(key, value) for key, value in found})


def _flatten(values: Section, prefix: str = "") -> Iterator[tuple[str, Json]]:
    """Iterate over the keys and values of a file; the first entry of a list stands for its key."""
    known = known_keys()
    for name, value in values.items():
        key = prefix + str(name)
        if key == "buffer.explorer_input.tasksets":
            key = "buffer.explorer_input.taskset"
        section = None if key in known else _section(key, value)
        if section is not None:
            yield from _flatten(section, f"{key}.")
        elif value is not None or key in known or not _begins_a_key(key):
            yield key, value


def _section(key: str, value: Json) -> Section | None:
    """Return the section that is a key's value, or the only entry of it."""
    entries = cast(list[Json], value if isinstance(value, list) else [value])
    if not all(isinstance(entry, Mapping) for entry in entries):
        return None
    if len(entries) > 1:
        raise ImportRefusal(f"{key} has {len(entries)} entries, and a recipe has one; leave one")
    return cast(list[Section], entries)[0] if entries else {}


def _begins_a_key(key: str) -> bool:
    known = known_keys()
    return any(other.startswith(f"{key}.") for other in (*known.defaults, *known.effects))


def _resolved(key: str, value: Json) -> Json:
    """Replace each `${oc.env:NAME,default}` in the texts of a value."""
    if isinstance(value, list):
        return [_resolved(key, entry) for entry in cast(list[Json], value)]
    if isinstance(value, Mapping):
        entries = cast(Section, value)
        return {name: _resolved(f"{key}.{name}", entry) for name, entry in entries.items()}
    if not isinstance(value, str):
        return value
    return INTERPOLATION.sub(lambda found: _variable(key, found.group(1)), value)


def _variable(key: str, expression: str) -> str:
    named = ENVIRONMENT.fullmatch(expression.strip())
    if named is None:
        raise ImportRefusal(
            f"{key} has ${{{expression}}}, which is not resolved here: only oc.env is; write its "
            "value in its place"
        )
    variable, default = named.groups()
    found = os.environ.get(variable, default)
    if found is None:
        raise ImportRefusal(f"{key} needs the environment variable {variable}; set it")
    return found.strip()
