"""Recipes from prefect.yaml, the one place where their values are written."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsError

from adapters.errors import UserError
from adapters.project.files import EXAMPLES
from flows.recipe.presets import PRESETS, merge
from flows.recipe.recipe import Recipe

PROJECT_FILE = Path("prefect.yaml")
TRAIN = "flows.train.train"
RECIPE_FILES = (".yaml", ".yml")
TABLES = ("roles", "algorithm.loss_settings", "algorithm.advantage_settings")
"""Keys of a recipe whose entries have names of their own."""


class RecipeError(UserError):
    """Refusal of a recipe."""


def project_files() -> list[Path]:
    """List the files of deployments; where two have the same name, the later file's counts.

    RecipeError if the working folder has none.
    """
    if not PROJECT_FILE.exists():
        raise RecipeError(
            f"there is no {PROJECT_FILE} in {Path.cwd()} to deploy; `ratchet init` writes one"
        )
    carried = EXAMPLES / PROJECT_FILE
    return [PROJECT_FILE] if PROJECT_FILE.samefile(carried) else [carried, PROJECT_FILE]


def named_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe of a training deployment, or of a YAML file, with each override over it.

    The deployment is the working folder's, or else one of the examples that Ratchet carries.
    """
    values = _read_recipe(name)
    if not isinstance(values, dict):
        raise RecipeError(f"{name} has no keys; give it the keys of a recipe")
    return changed_recipe(values, overrides)


def _read_recipe(name: str) -> Any:
    if name.endswith(RECIPE_FILES):
        path = Path(name)
        if not path.is_file():
            raise RecipeError(
                f"there is no recipe {path}; give a file, or a name of {PROJECT_FILE}"
            )
        return _read_yaml(path)
    deployments = _training_deployments(PROJECT_FILE)
    if name not in deployments:
        deployments = _training_deployments(EXAMPLES / PROJECT_FILE) | deployments
    if name not in deployments:
        raise RecipeError(
            f"{PROJECT_FILE} has no training deployment {name!r}; there are: "
            f"{', '.join(sorted(deployments))}"
        )
    return deployments[name]


def changed_recipe(values: dict[str, Any], overrides: Sequence[str] = ()) -> Recipe:
    """Validate a recipe, with each `section.key=value` put over its values.

    A preset among them replaces the algorithm that the values have.
    """
    given = parse_overrides(overrides)
    preset = PRESETS.get(given.get("algorithm", {}).get("preset"))
    if preset is not None:
        values = _without(values, preset.values) | {"algorithm": {}}
    try:
        return Recipe.model_validate(merge(values, given))
    except ValidationError as error:
        raise RecipeError(_explain(error)) from error


def recipe_options() -> str:
    """List every key of a recipe, with its type and explanation, as `--set` takes it."""
    source = CliSettingsSource(_settings(), cli_prog_name="--set", cli_exit_on_error=False)
    return source.root_parser.format_help()


def _training_deployments(file: Path) -> dict[str, Any]:
    """Read the training deployments of a prefect.yaml; there are none if there is no file."""
    if not file.exists():
        return {}
    declared = _read_yaml(file)
    try:
        entries = [(entry["name"], entry) for entry in declared["deployments"]]
        training = {name: entry for name, entry in entries if entry["entrypoint"] == TRAIN}
        return {name: entry["parameters"]["recipe"] for name, entry in training.items()}
    except (KeyError, TypeError) as error:
        raise RecipeError(
            f"{file} lists no deployments as Prefect reads them ({error!r}); give each a name, an "
            "entrypoint and parameters, with a recipe among them"
        ) from error


def _read_yaml(file: Path) -> Any:
    """Read a YAML file; RecipeError if it is not YAML."""
    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        said = " ".join(str(error).split())
        raise RecipeError(f"{file} is not YAML: {said}; mend it there") from error


@cache
def _settings() -> type[BaseSettings]:
    """Return the recipe as settings, which pydantic's command-line source reads."""
    return type("RecipeSettings", (BaseSettings, Recipe), {"model_config": Recipe.model_config})


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Parse each `section.key=value`, into sections."""
    arguments = [f"--{_argument(override)}" for override in overrides]
    try:
        source = CliSettingsSource(_settings(), cli_parse_args=arguments, cli_exit_on_error=False)
    except SettingsError as error:
        raise RecipeError(f"--set: {error}") from error
    return source()


def _argument(override: str) -> str:
    """Spell an override as pydantic reads it; the entries of tables such as `roles` are keys."""
    known = list(_keys(Recipe))
    key, equals, value = override.partition("=")
    if not equals:
        raise RecipeError(f"--set {override}: write it as section.key=value")
    table, _, entry = key.rpartition(".")
    if table in TABLES:
        return f"{table}={entry}={value}"
    if key not in known:
        raise RecipeError(f"a recipe has no key {key!r}{_suggestion(key, known)}")
    return override


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _keys(field.annotation, f"{prefix}{name}.")


def given_leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate over the keys of a recipe that are given, each table as one."""
    for name, value in values.items():
        key = prefix + name
        if isinstance(value, Mapping) and key not in TABLES:
            yield from given_leaves(value, f"{key}.")
        else:
            yield key, value


def _suggestion(key: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    listing = "`ratchet keys` lists them"
    return f"; did you mean {close[0]!r}? {listing}" if close else f"; {listing}"


def _without(values: dict[str, Any], sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values less the keys that are in the same section of `sections`."""
    return {
        section: {key: value for key, value in of.items() if key not in sections[section]}
        if section in sections and isinstance(of, dict)
        else of
        for section, of in values.items()
    }


def _explain(error: ValidationError) -> str:
    lines = [
        f"recipe.{'.'.join(str(part) for part in mistake['loc'])}: {mistake['msg']}"
        f" (got {mistake['input']!r})"
        for mistake in error.errors()
    ]
    return "; ".join(lines)
