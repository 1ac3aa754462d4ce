"""The text of an imported recipe: YAML, with the reason of each value beside it."""

import json
from collections.abc import Collection, Mapping, Sequence

import yaml

from flows.importing.translation import Translation
from flows.importing.trinity import translate
from flows.importing.trinity_file import read_trinity
from flows.recipe.loading import changed_recipe, parse_overrides
from flows.recipe.section import TABLES
from tasks.storage.keys import Json, Section, find, flatten


def import_trinity(name: str, text: str, overrides: Sequence[str] = ()) -> str:
    """Make the text of a recipe of a Trinity-RFT file, with each `section.key=value` over it."""
    chosen = flatten(parse_overrides(overrides), TABLES)
    translation = translate(read_trinity(name, text), chosen)
    translation.finish(name)
    if "algorithm.preset" in chosen:
        translation.forget("algorithm")
    recipe = changed_recipe(translation.nested(), overrides)
    return write_recipe(name, translation, recipe.model_dump(mode="json"), chosen)


def write_recipe(
    name: str, translation: Translation, recipe: Section, chosen: Collection[str]
) -> str:
    """Write the recipe that a translation has become, with the user's own values, as YAML.

    What has no counterpart is told below, a key a line.
    """
    reasons = {key: reason for key, (_, reason) in translation.values.items()}
    reasons |= dict.fromkeys(chosen, "given by --set")
    values = {key: (find(recipe, key), reason) for key, reason in reasons.items()}
    lines = [f"# A recipe made of {name}; `ratchet train` takes this file.", *_section(values, "")]
    if translation.left_out:
        lines += ["", "# Keys without a counterpart, and what each does in Trinity-RFT 0.6.0:"]
    lines += [f"# {key}: {effect}." for key, effect in translation.left_out.items()]
    return "\n".join(lines) + "\n"


def _section(values: Mapping[str, tuple[Json, str]], indent: str) -> list[str]:
    """Write the keys of one section, and then its own sections."""
    lines = [
        f"{indent}{key}: {_write(value)}  # {reason}"
        for key, (value, reason) in values.items()
        if "." not in key
    ]
    for section in dict.fromkeys(key.partition(".")[0] for key in values if "." in key):
        inside = {
            key.partition(".")[2]: value
            for key, value in values.items()
            if key.startswith(f"{section}.")
        }
        lines += [f"{indent}{section}:", *_section(inside, f"{indent}  ")]
    return lines


def _write(value: Json) -> str:
    """Write a value in one line."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    written = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), sort_keys=False)
    return written.removesuffix("...\n").strip()
