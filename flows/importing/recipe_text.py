"""The text of an imported recipe: YAML, with the reason of each value beside it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce

import yaml

from flows.importing.trinity import translate
from flows.importing.trinity_file import read_trinity
from flows.recipe.loading import changed_recipe, parse_overrides
from flows.recipe.section import TABLES
from tasks.storage.keys import Json, Section, find, flatten, merge, nest


def import_trinity(name: str, text: str, overrides: Sequence[str] = ()) -> str:
    """Make the text of a recipe of a Trinity-RFT file, with each `section.key=value` over it.

    What has no counterpart is told below, a key a line.
    """
    chosen = flatten(parse_overrides(overrides), TABLES)
    translation = translate(read_trinity(name, text), chosen)
    translation.check(name)
    values = translation.values
    if "algorithm.preset" in chosen:
        values = {key: value for key, value in values.items() if not key.startswith("algorithm.")}
    translated = _in_sections({key: value for key, (value, _) in values.items()})
    recipe = changed_recipe(translated, overrides).model_dump(mode="json")
    reasons = {key: reason for key, (_, reason) in values.items()}
    reasons |= dict.fromkeys(chosen, "given by --set")
    written = {key: f"{_write(find(recipe, key))}  # {why}" for key, why in reasons.items()}
    lines = [f"# A recipe made of {name}; `ratchet train` takes this file."]
    lines += _lay_out(_in_sections(written))
    if translation.left_out:
        lines += ["", "# Keys without a counterpart, and what each does in Trinity-RFT 0.6.0:"]
    lines += [f"# {key}: {effect}." for key, effect in translation.left_out.items()]
    return "\n".join(lines) + "\n"


def _in_sections(values: Section) -> Section:
    """Nest the values of whole keys, such as `section.key`."""
    return reduce(merge, (nest(key, value) for key, value in values.items()), {})


def _lay_out(section: Section, indent: str = "") -> Iterator[str]:
    """Yield the lines of a section: its keys, and then its own sections."""
    for key, value in sorted(section.items(), key=lambda item: isinstance(item[1], Mapping)):
        if isinstance(value, Mapping):
            yield f"{indent}{key}:"
            yield from _lay_out(value, f"{indent}  ")
        else:
            yield f"{indent}{key}: {value}"


def _write(value: Json) -> str:
    """Write a value in one line."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    written = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), sort_keys=False)
    return written.removesuffix("...\n").strip()
