"""Recipes as prefect.yaml or a file of YAML has them, and as a run has recorded them."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, TypeVar, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from ratchet.adapters.errors import UserError, did_you_mean, did_you_mean_key, instead_of
from ratchet.adapters.project.modules import EXAMPLES
from ratchet.adapters.redaction import quote
from ratchet.adapters.yaml_text import YamlError, read_yaml
from ratchet.flows.recipe.plan import FLOW_RECIPES, StagesRecipe, SweepRecipe
from ratchet.flows.recipe.recipe import Recipe
from ratchet.flows.recipe.run_recipe import FlowRecipe, RunRecipe, differing, without_free
from ratchet.tasks.settings.presets import PRESETS
from ratchet.tasks.settings.section import TABLES, explain, fields_of, section_of
from ratchet.tasks.storage.dotted_keys import Json, Section, merge_values, nest_value
from ratchet.tasks.storage.manifest import ByStep, lineage, recipe_of
from ratchet.tasks.storage.run_folder import RunError, RunFolder, folder_of

PROJECT_FILE = Path("prefect.yaml")
TRAIN = Recipe.model_fields["flow"].default
ENTRYPOINTS = {
    f"ratchet.flows.{flow}.{flow}": flow
    for flow in (
        *FLOW_RECIPES,
        *(of.model_fields["flow"].default for of in (StagesRecipe, SweepRecipe)),
    )
}
"""Flows that train, by their entrypoints in prefect.yaml."""
OLD_ENTRYPOINT = re.compile(r"flows\.(\w+)\.\1")
"""Entrypoint of a flow before all packages were within `ratchet`."""
RECIPE_FILES = (".yaml", ".yml")
PLAYED = (
    "`ratchet train` trains this one, and `ratchet evaluate NAME --model RUN` has the agent of "
    "another one play what it has learnt"
)
"""What to do with a recipe that has no agent, where one is to play."""
LENGTH = {"steps", "epochs"}
"""Keys that say how long a run is: a value of one takes the other's place."""

R = TypeVar("R", bound=FlowRecipe)
T = TypeVar("T", bound=RunRecipe)


class RecipeError(UserError):
    """Refusal of a recipe."""


def check_project_file() -> Path:
    """Return the working folder's file of deployments; RecipeError if it has none that is read."""
    if not PROJECT_FILE.exists():
        raise RecipeError(
            f"there is no {PROJECT_FILE} in {Path.cwd()} to deploy; `ratchet init` writes one"
        )
    _deployment_names(PROJECT_FILE)
    return PROJECT_FILE


def find_deployment(name: str) -> tuple[Path, str]:
    """Find a deployment by NAME or FLOW/NAME; return its file, and its NAME.

    The file is the working folder's, or else that of the examples. RecipeError if none has it.
    """
    carried = _deployment_names(EXAMPLES / PROJECT_FILE)
    own = _deployment_names(PROJECT_FILE)
    if name in own:
        return PROJECT_FILE, own[name]
    if name in carried:
        return EXAMPLES / PROJECT_FILE, carried[name]
    known = {*own.values(), *carried.values()}
    near = did_you_mean(name, {*own, *carried} if "/" in name else known)
    raise RecipeError(
        f"{PROJECT_FILE} has no deployment {name!r}; there are: {', '.join(sorted(known))}{near}"
    )


def named_recipe(name: str, overrides: Sequence[str] = (), kind: type[R] = Recipe) -> R:
    """Return the recipe of a training deployment, or of a YAML file, with each override over it.

    The deployment is the working folder's, or else one of the examples that Ratchet carries.
    UserError if the recipe is not of the `kind`.
    """
    values = _read_values(name)
    if not isinstance(values, dict):
        raise RecipeError(f"{name} has no keys; give it the keys of a recipe")
    return changed_recipe({"flow": TRAIN, **values}, overrides, kind)


def read_recipe(run: RunFolder, kind: type[T] = RunRecipe) -> T:
    """Read the recipe that a run is bound to; UserError if it is not of the `kind`."""
    recipe = _recipe(recipe_of(run))
    if not isinstance(recipe, kind):
        raise UserError(
            f"the run {run.path} was made by the flow {recipe.flow}, and this needs a run of "
            f"{', '.join(sorted(_kinds(kind)))}; name another run"
        )
    return recipe


def check_binding(run: RunFolder, recipe: RunRecipe) -> None:
    """Raise RunError if a run was started with a recipe of other results, or in another format.

    The recipe of an evaluation may break rules of trained recipes, so the recorded one is validated
    only where a value that binds differs, or is of a newer key.
    """
    values, free = recipe.model_dump(mode="json"), recipe.changes_no_result()
    if not without_free(recipe_of(run), values, free):
        return
    if changed := differing(read_recipe(run), recipe):
        raise RunError(
            f"the run {run.path} was started with another recipe, which differs in "
            f"{', '.join(changed)}; give the same values, or another name with --run"
        )


def read_lineage(run: RunFolder, recipe: RunRecipe) -> ByStep[RunRecipe]:
    """Return the recipes that make the steps of a run: those of its ancestors, and its own."""
    *ancestors, (own, _) = lineage(run)
    return ByStep((*((first, _recipe(values)) for first, values in ancestors), (own, recipe)))


def training_command(run: str) -> str:
    """Return the command that trains a run of this name, by the recipe after which it is named."""
    known = _training_deployments(EXAMPLES / PROJECT_FILE) | _training_deployments(PROJECT_FILE)
    named = [name for name in known if f"{run}-".startswith(f"{name}-")]
    return f"ratchet train {max(named, key=len, default='NAME')} --run {run}"


def _read_values(name: str) -> Json:
    if name.endswith(RECIPE_FILES):
        path = Path(name)
        if not path.is_file():
            raise RecipeError(
                f"there is no recipe {path}; give a file, or a name of {PROJECT_FILE}"
            )
        return _read_yaml(path)
    own = _training_deployments(PROJECT_FILE)
    deployments = own if name in own else _training_deployments(EXAMPLES / PROJECT_FILE) | own
    if name not in deployments:
        examples = ", ".join(sorted(deployments.keys() - own))
        there_are = [", ".join(sorted(own)), examples and f"the examples {examples}"]
        raise RecipeError(
            f"{PROJECT_FILE} has no training deployment {name!r}; there are: "
            f"{'; '.join(filter(None, there_are))}{did_you_mean(name, deployments)}"
        )
    return deployments[name]


def changed_recipe(values: Section, overrides: Sequence[str] = (), kind: type[R] = Recipe) -> R:
    """Validate a recipe, with each `section.key=value` put over its values.

    A preset among them replaces the algorithm that the values have. UserError if the recipe is not
    of the `kind`.
    """
    own = _kind_of({"flow": TRAIN, **values})
    if not issubclass(own, kind):
        raise UserError(
            f"the recipe is of the flow {own.model_fields['flow'].default}, and this needs one of "
            f"{', '.join(sorted(_kinds(kind)))}; {PLAYED if kind is Recipe else 'name another one'}"
        )
    given = parse_overrides(overrides, own)
    if LENGTH & given.keys():
        values = {key: value for key, value in values.items() if key not in LENGTH}
    if own is StagesRecipe:
        given = _named_stages(values, given)
    algorithm = given.get("algorithm")
    preset = PRESETS.get(str(algorithm.get("preset"))) if isinstance(algorithm, Mapping) else None
    if preset is not None:
        values = {**_without(values, preset.values), "algorithm": {}}
    return _validated(own, merge_values(values, given, emptying=True))


def _named_stages(values: Section, given: Section) -> Section:
    """Return what is given with the stages as a list, in which each is changed by its name."""
    changes, stages = given.get("stages"), values.get("stages")
    if not isinstance(changes, Mapping) or not isinstance(stages, Sequence):
        return given
    named = {str(one["name"]): one for one in stages if isinstance(one, Mapping) and "name" in one}
    for name in changes.keys() - named.keys():
        raise RecipeError(
            f"--set stages.{name}: there is no such stage{did_you_mean(name, named) or ';'} the "
            f"stages are {', '.join(named)}"
        )
    changed = [
        merge_values(one, change, emptying=True)
        if isinstance(change := changes.get(name), Mapping)
        else one
        for name, one in named.items()
    ]
    return {**given, "stages": changed}


def swept_recipe(
    name: str | None, replay: str | None, chosen: Mapping[str, Json], overrides: Sequence[str]
) -> SweepRecipe:
    """Return a sweep: one that is named, or one of the keys that are given several values.

    The `chosen` values of keys of its own are laid over it. RecipeError if no key has several.
    """
    if name is not None and isinstance(named_recipe(name, (), FlowRecipe), SweepRecipe):
        options = [f"{key}={value}" for key, value in chosen.items()]
        return named_recipe(name, [*overrides, *options], SweepRecipe)
    several = [one for one in overrides if "," in one]
    fixed = [one for one in overrides if "," not in one]
    if not several:
        raise RecipeError("no key has several values; give --set KEY=VALUE,VALUE")
    if name is not None:
        base = named_recipe(name, fixed, RunRecipe)
    else:
        base = changed_recipe(recipe_of(folder_of(replay or "")), fixed, RunRecipe)
    grid = {key: text.split(",") for key, _, text in (one.partition("=") for one in several)}
    varied = {"base": base.model_dump(mode="json"), "replay": replay, "grid": grid}
    return changed_recipe({"flow": "sweep", **varied, **chosen}, (), SweepRecipe)


def count_steps(recipe: T) -> T:
    """Return the recipe with its epochs, if it has any, counted in steps, as runs are bound to it.

    UserError if its training examples cannot be read, or a key does not fit so many steps.
    """
    if not recipe.epochs:
        return recipe
    steps = recipe.steps_of(recipe.epochs)
    return _validated(type(recipe), recipe.model_dump() | {"steps": steps, "epochs": 0})


def count_stages(recipe: StagesRecipe) -> StagesRecipe:
    """Return the recipe of stages with the epochs of each, less those of earlier runs, counted."""
    stages = [
        stage
        if recipe.reads_runs(stage)
        else stage.model_copy(update={"recipe": count_steps(stage.recipe)})
        for stage in recipe.stages
    ]
    counted = recipe.model_copy(update={"stages": tuple(stages)}).model_dump()
    return _validated(StagesRecipe, counted)


def _validated(kind: type[R], values: Section) -> R:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise RecipeError(explain(error, kind)) from None  # which quotes secrets


def recipe_options(*of: str) -> str:
    """List keys of a recipe, each with its type, default and explanation, for `--set`.

    `of` has the flow, a section of its recipe, or both; without a flow the section is that of the
    first flow that has it. RecipeError if there is none.
    """
    kinds = _kinds(FlowRecipe)
    wanted = [one for one in of if one not in kinds]
    flows = [one for one in of if one in kinds] or [TRAIN, *kinds]
    for flow in flows:
        if {*wanted} <= {*_sections(kinds[flow])}:
            return "\n".join(
                _describe(key, field)
                for key, field in fields_of(kinds[flow])
                if not wanted or f"{key}.".startswith(tuple(f"{one}." for one in wanted))
            )
    known = _sections(kinds[flows[0]])
    raise RecipeError(
        f"there is no flow or section {', '.join(wanted)}; the flows are "
        f"{', '.join(sorted(kinds))}, and the sections of {flows[0]} are {', '.join(known)}"
        f"{did_you_mean(wanted[0], [*kinds, *known])}"
    )


def _sections(kind: type[FlowRecipe]) -> list[str]:
    return [key for key, field in fields_of(kind) if section_of(field)]


def _describe(key: str, field: FieldInfo) -> str:
    if section := section_of(field):
        return f"{key}: {section.__doc__}"
    kind = str(getattr(field.annotation, "__name__", field.annotation)).replace("typing.", "")
    default = field.get_default(call_default_factory=True, validated_data={})
    given = "required" if field.is_required() else repr(default)
    said = " ".join(f"{key} ({kind}; {given}): {field.description}".split())
    return fill(said, 100, initial_indent="  ", subsequent_indent="      ")


def _training_deployments(file: Path) -> dict[str, Json]:
    """Read the training deployments of a prefect.yaml; there are none if there is no file."""
    read: dict[str, Json] = {}
    for name, one in read_deployments(file).items():
        if (flow := ENTRYPOINTS.get(one["entrypoint"])) is None:
            continue
        parameters = one.get("parameters")
        if not isinstance(parameters, dict) or "recipe" not in parameters:
            raise RecipeError(
                f"the deployment {name} of {file} has no parameter recipe; give it one, with the "
                "keys of a recipe"
            )
        recipe = parameters["recipe"]
        read[name] = {"flow": flow} | recipe if isinstance(recipe, dict) else recipe
    return read


def _deployment_names(file: Path) -> dict[str, str]:
    """Map NAME and FLOW/NAME of each deployment to NAME; there are none if there is no file."""
    deployments = read_deployments(file)
    flows = {name: re.split("[.:]", one["entrypoint"])[-1] for name, one in deployments.items()}
    whole = {f"{flow.replace('_', '-')}/{name}": name for name, flow in flows.items()}
    return {name: name for name in deployments} | whole


def read_deployments(file: Path) -> dict[str, dict[str, Any]]:
    """Read the deployments of a prefect.yaml by their names; none if there is no file.

    RecipeError if it is not one that Prefect reads.
    """
    if not file.exists():
        return {}
    values = _read_yaml(file)
    try:
        read = {str(one["name"]): one for one in values["deployments"] if str(one["entrypoint"])}
    except (KeyError, TypeError) as error:
        raise RecipeError(
            f"{file} has no list `deployments` of which each has a name and an entrypoint "
            f"({error!r}); give it one, as Prefect reads it"
        ) from error
    for name, one in read.items():
        if OLD_ENTRYPOINT.fullmatch(entrypoint := str(one["entrypoint"])):
            raise RecipeError(
                f"the deployment {name} of {file} has the entrypoint {entrypoint} of an earlier "
                f"version; write ratchet.{entrypoint}"
            )
    return read


def _read_yaml(file: Path) -> Any:
    """Read a YAML file; RecipeError if it is not YAML."""
    try:
        return read_yaml(file.read_text(encoding="utf-8"))
    except (YamlError, UnicodeDecodeError) as error:
        raise RecipeError(f"{file} is not YAML: {error}; mend it there") from None
    except OSError as error:
        raise RecipeError(f"{file} cannot be read: {error.strerror}") from error


def parse_overrides(overrides: Sequence[str], kind: type[FlowRecipe] = Recipe) -> dict[str, Json]:
    """Parse each `section.key=value`, into sections; the entries of tables are keys too."""
    known = dict(fields_of(kind))
    given: dict[str, Json] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise RecipeError(f"--set {key}: write it as section.key=value")
        if key not in known and not key.startswith(tuple(f"{table}." for table in TABLES)):
            near = instead_of(key) or did_you_mean_key(key, known)
            flow = kind.model_fields["flow"].default
            listed = "ratchet keys" if flow == TRAIN else f"ratchet keys {flow}"
            raise RecipeError(f"a recipe has no key {key!r}{near} `{listed}` lists them")
        try:
            given = merge_values(given, nest_value(key, _parse(text, known.get(key))))
        except YamlError as error:
            raise RecipeError(
                f"--set {key}: {quote(text, key)} is no list or table of YAML: {error}"
            ) from None
    return given


def _parse(text: str, field: FieldInfo | None) -> Json:
    """Parse a value: a list or a table as YAML, unless the key takes text; `null` is none."""
    kind = field.annotation if field else None
    if text == "null":
        return None
    if kind in (str, str | None):
        return text
    if text.startswith(("[", "{")):
        return read_yaml(text)
    return text.split(",") if get_origin(kind) is tuple else text


def _without(values: Section, sections: Mapping[str, Section]) -> dict[str, Json]:
    """Return the values less the keys that are in the same section of `sections`."""
    return {
        section: {key: value for key, value in of.items() if key not in sections[section]}
        if section in sections and isinstance(of, Mapping)
        else of
        for section, of in values.items()
    }


def _recipe(values: Mapping[str, Any]) -> RunRecipe:
    return _validated(_kind_of(values, RunRecipe), values)


def _kind_of(values: Mapping[str, Any], kind: type[R] = FlowRecipe) -> type[R]:
    """Return the recipe of the flow that the values name, which is of a kind."""
    kinds = _kinds(kind)
    flow = values.get("flow")
    if not isinstance(flow, str) or flow not in kinds:
        raise UserError(
            f"no recipe is for a flow {quote(flow)}; there are recipes for "
            f"{', '.join(sorted(kinds))}: "
            "give one of these, or continue a run with the version that wrote it"
            + did_you_mean(flow if isinstance(flow, str) else "", kinds)
        )
    return kinds[flow]


def _kinds(kind: type[R]) -> dict[str, type[R]]:
    named: dict[str, type[R]] = {}
    for further in kind.__subclasses__():
        named |= _kinds(further)
    flow = kind.model_fields["flow"].default
    return named | ({flow: kind} if isinstance(flow, str) else {})
