"""A translation into a recipe, and its text: YAML, with the reason of each value."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

import yaml

from flows.importing.trinity_file import ImportRefusal, TrinityFile
from flows.recipe.loading import changed_recipe
from flows.recipe.run_recipe import RunRecipe
from tasks.storage.keys import Json, Section, find, merge, nest


@dataclass
class Translation:
    """Values of a recipe, by `section.key`, each with its reason.

    `chosen` are the values that the user gives in place of those of the file. A problem is settled
    if the user gives one of its keys; `left_out` maps a key of the file without a counterpart to
    what it would have done.
    """

    file: TrinityFile
    chosen: Section
    values: dict[str, tuple[Json, str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def give(self, key: str, value: Json, reason: str) -> None:
        self.values[key] = value, reason

    def copy(
        self, ours: str, theirs: str, kind: Callable[[float], Json] | None = None, note: str = ""
    ) -> None:
        """Set a key of the recipe to the value of one of the file: any, or a `kind` of number."""
        value = self.file.get(theirs) if kind is None else kind(self.file.number(theirs))
        self.give(ours, value, self.file.reason(theirs) + note)

    def give_path(self, key: str, path: Json, subset: Json) -> None:
        """Set the data set to a file, a folder or a data set of the hub, and its subset."""
        if path is None:
            self.refuse(f"{key} is missing", "dataset.path")
            return
        local = str(path).startswith((".", "/")) or str(path).count("/") != 1
        of_hub = "/".join(str(part) for part in (f"hub:{path}", subset) if part)
        file = str(path).endswith((".csv", ".jsonl", ".parquet"))
        self.give("dataset.path", str(path) if local or file else of_hub, f"{key} and subset_name")

    def refuse(self, said: str, *settled_by: str) -> None:
        """Note what no recipe says, unless the user gives one of the keys in its place."""
        if not self.chosen.keys() & {*settled_by}:
            remedy = f"; give --set {settled_by[0]}=…" if settled_by else ""
            self.problems.append(said + remedy)


def write_recipe(translation: Translation, overrides: Sequence[str]) -> list[str]:
    """Write the lines of the recipe that a translation has become, with each override over it.

    What has no counterpart is told below, a key a line. ImportRefusal if there are problems.
    """
    if translation.problems:
        raise ImportRefusal("; and ".join(translation.problems))
    values = translation.values
    if "algorithm.preset" in translation.chosen:
        values = {key: value for key, value in values.items() if not key.startswith("algorithm.")}
    translated = _in_sections({key: value for key, (value, _) in values.items()})
    recipe = changed_recipe(translated, overrides, RunRecipe).model_dump(mode="json")
    reasons = {key: reason for key, (_, reason) in values.items()}
    reasons |= dict.fromkeys(translation.chosen, "given by --set")
    written = {key: f"{_write(find(recipe, key))}  # {why}" for key, why in reasons.items()}
    lines = [*_lay_out(_in_sections(written))]
    if translation.left_out:
        lines += ["", "# Keys without a counterpart, and what each does in Trinity-RFT 0.6.0:"]
    return lines + [f"# {key}: {effect}." for key, effect in translation.left_out.items()]


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
