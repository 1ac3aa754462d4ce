"""A translation into a recipe, and its text: YAML, with the reason of each value."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

from adapters.yaml_text import write_yaml
from flows.importing.trinity_file import ImportRefusal, MissingVariable, TrinityFile
from flows.recipe.loading import changed_recipe
from flows.recipe.run_recipe import RunRecipe
from tasks.storage.dotted_keys import Json, Section, find_value, merge_values, nest_value


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

    def replaces(self, key: str) -> bool:
        """Return whether the user gives what the key is a part of: a preset, or the function."""
        part = key.removesuffix("_settings")
        settings = part != key and part in self.chosen
        return settings or ("algorithm.preset" in self.chosen and key.startswith("algorithm."))

    def value_of(self, key: str) -> Json:
        """Return the value of a key, as the user gives it or else the file; None without one."""
        return self.chosen.get(key, self.values.get(key, (None, ""))[0])

    def copy(
        self, ours: str, theirs: str, kind: Callable[[float], Json] | None = None, note: str = ""
    ) -> None:
        """Set a key of the recipe to the value of one of the file: any, or a `kind` of number.

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
        """Set the data set to a section's: a file, a folder, or one of the hub with its subset."""
        key = f"{section}.path"
        self.copy("dataset.path", key)
        if "dataset.path" not in self.values:
            return
        path, _ = self.values.pop("dataset.path")
        if path is None:
            self.refuse(f"{key} is missing", "dataset.path")
            return
        subset = self.file.get(f"{section}.subset_name")
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
    values = {
        key: value for key, value in translation.values.items() if not translation.replaces(key)
    }
    translated = _in_sections({key: value for key, (value, _) in values.items()})
    recipe = changed_recipe(translated, overrides, RunRecipe).model_dump(mode="json")
    reasons = {key: reason for key, (_, reason) in values.items()}
    reasons |= dict.fromkeys(translation.chosen, "given by --set")
    written = {
        key: f"{write_yaml(find_value(recipe, key), in_one_line=True)}  # {' '.join(why.split())}"
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
