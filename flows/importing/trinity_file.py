"""A configuration of Trinity-RFT 0.6.0 as it is read: every key is known, every value resolved."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, reduce
from pathlib import Path
from typing import Any, cast

from ratchet.adapters.errors import UserError, listed
from ratchet.adapters.redaction import SECRET_VARIABLE
from ratchet.adapters.yaml_text import YamlError, read_yaml
from ratchet.flows.recipe.loading import changed_recipe
from ratchet.flows.recipe.run_recipe import RunRecipe
from ratchet.tasks.storage.dotted_keys import Json, Section, find_value, merge_values, nest_value
from ratchet.tasks.storage.files import read_bytes

VERSION = "Trinity-RFT 0.6.0"
EVALUATED = "buffer.explorer_input.eval_tasksets"
ENVIRONMENT = re.compile(r"oc\.env:\s*([A-Za-z_]\w*)\s*(?:,(.*))?", re.DOTALL)
INTERPOLATION = re.compile(r"\$\{([^{}]*)\}")


class ImportRefusal(UserError):
    """Refusal of a file that no recipe can express."""


class MissingVariable(ImportRefusal):
    """Refusal of a value whose variable the environment lacks."""


@dataclass(frozen=True)
class RefusedKey:
    """A key that changes what is trained, and has no counterpart.

    Its values in `off` do nothing. Every value does nothing where the key `only_with` is off, or
    the key `not_with` is on. A user overrides the refusal by a value of a key in `overridden_by`.
    """

    effect: str
    off: tuple[Json, ...] = ()
    only_with: str = ""
    not_with: str = ""
    overridden_by: tuple[str, ...] = ()

    def is_off(self, value: Json, file: "TrinityFile") -> bool:
        """Return whether the key does nothing in a file, at its value there."""
        alone = bool(self.only_with) and not file.given.get(self.only_with)
        return value in self.off or alone or bool(file.given.get(self.not_with))


@dataclass(frozen=True)
class Keys:
    """Keys of a configuration: those with a counterpart, and the effects of the others."""

    defaults: Section
    refused: Mapping[str, RefusedKey]
    effects: Mapping[str, str]

    def __contains__(self, key: object) -> bool:
        return key in self.defaults or key in self.effects or key in self.refused


@dataclass(frozen=True)
class TrinityFile:
    """The values of a file, by their whole keys, such as `buffer.batch_size`."""

    given: Section

    def get(self, key: str) -> Any:
        """Return the value of a key, or Trinity's default if it is translated."""
        if key in self.given:
            value = self.resolve(key, self.given[key])
            if key.endswith("_args"):  # a null counts as not given
                return {name: one for name, one in (value or {}).items() if one is not None}
            return value
        return known_keys().defaults[key]

    def resolve(self, key: str, value: Json) -> Any:
        """Replace each `${oc.env:NAME,default}` in the texts of a value."""
        if isinstance(value, list):
            return [self.resolve(key, entry) for entry in cast(list[Json], value)]
        if isinstance(value, Mapping):
            entries = cast(Section, value)
            return {name: self.resolve(f"{key}.{name}", one) for name, one in entries.items()}
        if not isinstance(value, str):
            return value
        return INTERPOLATION.sub(lambda found: self._variable(key, found.group(1)), value)

    def number(self, key: str) -> float:
        return float(self.get(key))

    def first(self, *keys: str) -> str:
        """Return the first of the keys that has a value, or else the last."""
        return next((key for key in keys if self.get(key) is not None), keys[-1])

    def reason(self, key: str) -> str:
        """Say where the value of a key comes from."""
        return key if key in self.given else f"Trinity's default of {key}"

    def _variable(self, key: str, expression: str) -> str:
        named = ENVIRONMENT.fullmatch(expression.strip())
        if named is None:
            raise ImportRefusal(
                f"{key} has ${{{expression}}}, which is not resolved here: only oc.env is; write "
                "its value in its place"
            )
        variable, default = named.groups()
        if SECRET_VARIABLE.search(variable):
            raise ImportRefusal(
                f"{key} reads the variable {variable}, which is named like a secret, and a recipe "
                "holds none; write the value in its place if it is no secret"
            )
        if (found := os.environ.get(variable, default)) is None:
            raise MissingVariable(f"{key} needs the environment variable {variable} to be set")
        return found.strip()


@cache
def known_keys() -> Keys:
    table: Any = read_yaml(read_bytes(Path(__file__).parent / "trinity.yaml").decode())
    whole = {
        f"{section}.*": [f"{section}.{key}" for key in keys.split()]
        for section, keys in table["sections"].items()
    }
    effects = {
        key: row["effect"]
        for row in table["untranslated"]
        for named in row["keys"]
        for key in whole.get(named, [named])
    }
    refused = {
        key: RefusedKey(
            row["effect"],
            (None, [], {}, *row.get("off", ())),
            row.get("only_with", ""),
            row.get("not_with", ""),
            tuple(row.get("overridden_by", ())),
        )
        for row in table["refused"]
        for key in row["keys"]
    }
    return Keys(table["translated"] | table["given"], refused, effects)


def read_values(name: str, text: str) -> Section:
    """Read the sections of a file's text, by the rules of YAML 1.1, which OmegaConf follows."""
    try:
        values = read_yaml(text, older=True)
    except YamlError as error:
        raise ImportRefusal(f"{name} is no YAML: {error}; mend it there") from None
    if not isinstance(values, Mapping):
        raise ImportRefusal(f"{name} has no keys; give a configuration of {VERSION}")
    return cast(Section, values)


def trinity_file(name: str, values: Section) -> TrinityFile:
    """Make the file of its sections; ImportRefusal if a key is unknown."""
    found = [*_flatten(values)]
    unknown = [key for key, _ in found if key not in known_keys()]
    if unknown:
        raise ImportRefusal(
            f"{name} has keys that are unknown to {VERSION}: {listed(unknown)}; correct or "
            "remove them"
        )
    return TrinityFile(dict(found))


def named_path(path: object, *subset: object) -> str:
    """Return a path of Trinity's as ours: a file, a folder, or the hub's name with its subset."""
    local = str(path).startswith((".", "/")) or str(path).count("/") != 1
    file = str(path).endswith((".csv", ".jsonl", ".parquet"))
    of_hub = "/".join(str(part) for part in (f"hub:{path}", *subset) if part)
    return str(path) if local or file else of_hub


def _flatten(values: Section, prefix: str = "") -> Iterator[tuple[str, Json]]:
    """Iterate over the keys and values of a file; the first entry of a list comes last."""
    known = known_keys()
    for name, value in values.items():
        key = f"{prefix}{name}"
        if key == "buffer.explorer_input.tasksets":
            key = "buffer.explorer_input.taskset"
        sections = None if key in known else _sections(key, value)
        for section in reversed(sections or ()):
            yield from _flatten(section, f"{key}.")
        if sections is None and (value is not None or key in known or not _begins_a_key(key)):
            yield key, value


def _sections(key: str, value: Json) -> Sequence[Section] | None:
    """Return the sections in a key's value; only the key of held-out data sets may have several."""
    entries = cast(Sequence[Json], value if isinstance(value, list) else [value])
    if not all(isinstance(entry, Mapping) for entry in entries):
        return None
    if len(entries) > 1 and key != EVALUATED:
        raise ImportRefusal(f"{key} has {len(entries)} entries, and a recipe has one; leave one")
    return cast(Sequence[Section], entries)


def _begins_a_key(key: str) -> bool:
    known = known_keys()
    keys = (*known.defaults, *known.effects, *known.refused)
    return any(other.startswith(f"{key}.") for other in keys)


@dataclass
class Translation:
    """Values of a recipe, by `section.key`, each with its reason.

    `chosen` are the values that the user gives in place of the file's. `left_out` maps a key of the
    file without a counterpart to what it would have done.
    """

    file: TrinityFile
    chosen: Section
    values: dict[str, tuple[Json, str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def give(self, key: str, value: Json, reason: str) -> None:
        self.values[key] = value, reason

    def replaces(self, key: str) -> bool:
        """Return whether the user gives the preset or the function that the key is a part of."""
        part = key.removesuffix("_settings")
        settings = part != key and part in self.chosen
        return settings or ("algorithm.preset" in self.chosen and key.startswith("algorithm."))

    def value_of(self, key: str) -> Json:
        """Return the value of a key: the user's, else the file's, else None."""
        return self.chosen.get(key, self.values.get(key, (None, ""))[0])

    def copy(
        self, ours: str, theirs: str, kind: Callable[[float], Json] | None = None, note: str = ""
    ) -> None:
        """Set a key of the recipe to the value of one of the file's, made a `kind` of number.

        A variable that the environment lacks is refused, unless the user gives the key.
        """
        if ours in self.chosen:
            return
        try:
            value = self.file.get(theirs) if kind is None else kind(self.file.number(theirs))
        except MissingVariable as missing:
            self.refuse(str(missing), ours)
        else:
            self.give(ours, value, self.file.reason(theirs) + note)

    def give_path(self, section: str) -> None:
        """Set the data set to a section's."""
        key = f"{section}.path"
        self.copy("dataset.path", key)
        if "dataset.path" not in self.values:
            return
        path, _ = self.values.pop("dataset.path")
        if path is None:
            self.refuse(f"{key} is missing", "dataset.path")
            return
        subset = self.file.get(f"{section}.subset_name")
        self.give("dataset.path", named_path(path, subset), f"{key} and subset_name")

    def refuse(self, said: str, *overridden_by: str) -> None:
        """Note what no recipe can express, unless the user gives a key that overrides it."""
        if not self.chosen.keys() & {*overridden_by}:
            remedy = f"; give --set {overridden_by[0]}=…" if overridden_by else ""
            self.problems.append(said + remedy)


def write_recipe(translation: Translation, overrides: Sequence[str]) -> list[str]:
    """Write the lines of a translation's recipe, with each override over it.

    Keys without a counterpart come last, one a line. ImportRefusal if there are problems.
    """
    if translation.problems:
        raise ImportRefusal("; and ".join(translation.problems))
    values = {
        key: value for key, value in translation.values.items() if not translation.replaces(key)
    }
    translated = _in_sections({key: value for key, (value, _) in values.items()})
    recipe = changed_recipe(translated, overrides, RunRecipe).model_dump(mode="json")
    reasons = {key: reason for key, (_, reason) in values.items()}
    reasons |= dict.fromkeys(translation.chosen, "given by --set")
    written = {
        key: f"{json.dumps(find_value(recipe, key), ensure_ascii=False)}  # {' '.join(why.split())}"
        for key, why in reasons.items()
    }
    lines = [*_lay_out(_in_sections(written))]
    if translation.left_out:
        lines += ["", "# Keys without a counterpart, and what each does in Trinity-RFT 0.6.0:"]
    return lines + [
        f"# {key}: {' '.join(effect.split())}." for key, effect in translation.left_out.items()
    ]


def _in_sections(values: Section) -> Section:
    """Nest the values of whole keys, such as `section.key`."""
    return reduce(merge_values, (nest_value(key, value) for key, value in values.items()), {})


def _lay_out(section: Section, indent: str = "") -> Iterator[str]:
    """Yield the lines of a section: its keys, and then its own sections."""
    for key, value in sorted(section.items(), key=lambda item: isinstance(item[1], Mapping)):
        if isinstance(value, Mapping):
            yield f"{indent}{key}:"
            yield from _lay_out(value, f"{indent}  ")
        else:
            yield f"{indent}{key}: {value}"
