"""Checks of the architecture: allowed imports, and the size and the language of the code."""

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Set
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = {
    "ratchet": {"ratchet", "flows", "tasks", "adapters"},
    "flows": {"flows", "tasks", "adapters", "durable"},
    "pretraining": {"pretraining", "flows", "tasks", "adapters", "engine", "durable"},
    "tasks": {"tasks", "adapters", "durable"},
    "adapters": {"adapters", "durable"},
    "engine": {"engine", "durable"},
    "durable": {"durable"},
    "agents": set(),
}
MODULES = "its modules"
"""Part of a layer: the modules that lie in its own folder, unless they are parts by themselves."""
ARROWS = {
    "flows": {
        "cli": {MODULES, "opening", "checkpoints", "server", "importing", "recipe"},
        MODULES: {"opening", "checkpoints", "recipe", "server"},
        "opening": {"checkpoints", "recipe"},
        "checkpoints": {"recipe"},
        "server": {"recipe"},
        "importing": {"recipe"},
        "recipe": set(),
    },
    "tasks": {
        MODULES: {"recording", "storage", "settings", "algorithm", "examples", "comparison"},
        "settings": {"algorithm", "examples", "storage"},
        "recording": {"storage"},
        "comparison": {"recording", "storage"},
        "examples": {"storage"},
        "storage": set(),
        "algorithm": set(),
        "given": {
            MODULES,
            "settings",
            "algorithm",
            "comparison",
            "examples",
            "recording",
            "recovery",
            "storage",
        },
        "reports": {
            MODULES,
            "settings",
            "comparison",
            "recording",
            "storage",
            "algorithm",
            "examples",
            "given",
            "spending",
        },
        "spending": {"settings", "recording", "storage"},
        "tracking": {MODULES, "settings", "algorithm", "recording", "reports", "storage"},
    },
    "adapters": {
        MODULES: set(),
        "network": {MODULES, "process"},
        "process": {MODULES},
        "clients": {MODULES, "network"},
        "project": {MODULES},
        "rendering": {MODULES},
        "dialects": {MODULES, "rendering"},
        "harness": {MODULES, "clients", "network", "places", "process", "programs", "project"},
        "places": {MODULES, "clients", "network", "process", "project"},
        "programs": {MODULES, "clients", "places", "process"},
        "tinker": {MODULES, "network", "process", "wires"},
        "wires": {MODULES, "network"},
        "diagnosis": {MODULES, "tinker"},
        "weights": {MODULES},
        "door": {
            MODULES,
            "clients",
            "dialects",
            "harness",
            "network",
            "process",
            "project",
            "rendering",
        },
    },
    "engine": {
        "__main__": {"api", "core", "model", "state", "disk", "errors"},
        "api": {"core", "futures", "training", "sampling", "state", "model", "errors"},
        "core": {"futures", "training", "sampling", "state", "model", "errors"},
        "futures": {"errors"},
        "training": {"model", "errors"},
        "sampling": {"model", "errors"},
        "state": {"model", "disk", "errors"},
        "model": {"disk", "errors"},
        "disk": {"errors"},
        "errors": set(),
    },
}
"""Layer → part (sub-package or module) → the other parts of the layer that it may import."""
ONLY_IN = {
    "yaml": {f"adapters/{MODULES}"},
    "prefect": {"flows", "tasks", "pretraining"},
    "torch": {"engine", "pretraining", "adapters/weights"},
    "transformers": {"engine", "pretraining", "adapters/weights"},
}
"""Framework → the layers, and the parts of layers, that may import it."""
LARGEST_FOLDERS = {
    **dict.fromkeys(LAYERS, 12),
    "agents": 14,
    "benchmarks": 12,
    "tests/support": 12,
    "tests": 40,
}
"""Tree → how many modules each of its folders may hold."""
ONE_MEANING = ("adapters", "durable", "engine", "flows", "tasks")
"""Layers in which a constant's name has one value; a type variable has one letter."""
LONGEST_FUNCTION = 50
LONGEST_FILE = 600
MOST_PARAMETERS = 6
COMMANDS = [
    ROOT / "flows" / "cli" / f"{name}.py" for name in ("checkpoints", "recipes", "training")
]

FILE_ACCESS = {
    "read_text", "write_text", "read_bytes", "write_bytes", "open", "exists", "unlink", "glob",
    "rglob", "iterdir", "is_file", "mkdir", "touch",
}  # fmt: skip
OUTSIDE_A_RUN = {
    "flows/recipe/loading.py",  # reads prefect.yaml
    "flows/cli/new_project.py",  # writes a project of the user's
    "flows/checkpoints/forks.py",  # copies an engine's own files
    "tasks/recording/journal.py",  # is part of the seam: it syncs each span
    "tasks/examples/reading.py",  # reads data sets
    "tasks/examples/rows.py",  # likewise
    "tasks/tracking/trackers.py",  # reads the folders of W&B
}

OWN_LOOPS = {"asyncio.run", "asyncio.Runner", "asyncio.new_event_loop"}
FOREIGN = {
    "adapters/process/event_loop.py",  # makes our loops
    "adapters/harness/verifiers_program.py",  # a Python without our packages runs it
    "flows/cli/template/crewai/tests/test_introduce.py",  # is a project of the user's
}

FRAGMENT = re.compile(
    r"(Of|By|With|In|To|From|On|At|As|For|Which|Where|When|While|What|Who|Whose|How|That|It|Its|"
    r"Whether|If|Beside|Behind|Between|Without)\b"
)
NOUN = re.compile(r"(The|A|An|This|These|Some|Any|All|Every|Each|No)\b")


def modules_of(layer: str) -> list[Path]:
    return sorted((ROOT / layer).rglob("*.py"))


EVERY_MODULE = [(layer, path) for layer in LAYERS for path in modules_of(layer)]


def every_module(rule: Callable[[str, Path], None]) -> Callable[[], None]:
    """Make one test of a rule about a module; its failure names every module that breaks the rule.

    A test a module would take longer to collect and to report than to run.
    """

    def test() -> None:
        broken = []
        for layer, path in EVERY_MODULE:
            try:
                rule(layer, path)
            except AssertionError as error:
                broken.append(f"{path.relative_to(ROOT)}: {error}")
        if broken:
            pytest.fail("\n".join(broken), pytrace=False)

    return test


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(path.read_text()))]


@cache
def imported_names(path: Path) -> set[str]:
    """Return all imported names, also those imported in functions or under TYPE_CHECKING.

    Ours are told by their folder in the repository, to which a link in `ratchet/` leads.
    """
    names = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively; name the package"
            names |= {f"{node.module}.{name.name}" for name in node.names}
    return {name.removeprefix("ratchet.") for name in names}


def imported_roots(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imported_names(path)}


def imported_modules(path: Path, layer: str) -> set[Path]:
    """Return the modules of the layer that a module imports."""
    modules = set()
    for name in imported_names(path):
        if name.split(".")[0] == layer:
            place = ROOT.joinpath(*name.split("."))
            files = (place.with_suffix(".py"), place.parent.with_suffix(".py"))
            modules |= {next((file for file in files if file.is_file()), place / "__init__.py")}
    return {module for module in modules if module.is_file()}


def part_of(path: Path, layer: str) -> str:
    part = path.relative_to(ROOT / layer).with_suffix("").parts[0]
    return part if part in ARROWS[layer] else MODULES


def definitions(path: Path) -> Iterator[Definition]:
    for node in nodes_of(path):
        if isinstance(node, Definition):
            yield node


def circle_in(graph: Mapping[Any, Set[Any]]) -> list[Any]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def is_property(node: Definition) -> bool:
    return any("property" in ast.unparse(decorator) for decorator in node.decorator_list)


@every_module
def test_imports_point_downward(layer: str, path: Path) -> None:
    ours = imported_roots(path) & LAYERS.keys()
    assert ours <= LAYERS[layer], f"{path} may not import {sorted(ours - LAYERS[layer])}"


@pytest.mark.parametrize("layer", ARROWS)
def test_imports_between_the_parts_of_a_layer_point_one_way(layer: str) -> None:
    assert circle_in(ARROWS[layer]) == []
    for path in modules_of(layer):
        part = part_of(path, layer)
        imported = {part_of(module, layer) for module in imported_modules(path, layer)}
        forbidden = imported - ARROWS[layer].get(part, set()) - {part}
        assert not forbidden, f"{path} may not import {sorted(forbidden)} of {layer}"


@pytest.mark.parametrize("layer", LAYERS)
def test_no_modules_import_each_other_in_a_circle(layer: str) -> None:
    graph = {path: imported_modules(path, layer) - {path} for path in modules_of(layer)}
    assert circle_in(graph) == []


@every_module
def test_heavy_frameworks_stay_in_their_layers(layer: str, path: Path) -> None:
    for framework, homes in ONLY_IN.items():
        part = f"{layer}/{part_of(path, layer)}" if layer in ARROWS else layer
        assert {layer, part} & homes or framework not in imported_roots(path)


@pytest.mark.parametrize(("tree", "most"), LARGEST_FOLDERS.items())
def test_folders_hold_few_files(tree: str, most: int) -> None:
    for folder in {path.parent for path in modules_of(tree)}:
        files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(files) <= most, f"{folder} holds {len(files)} files"


@every_module
def test_functions_and_files_are_short(layer: str, path: Path) -> None:
    assert path.read_text().count("\n") <= LONGEST_FILE
    for node in definitions(path):
        if isinstance(node, ast.ClassDef):
            continue
        length = (node.end_lineno or 0) - node.lineno + 1
        assert length <= LONGEST_FUNCTION, f"{path}:{node.lineno} {node.name} has {length} lines"
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        parameters = [one.arg for one in given if one.arg not in ("self", "cls")]
        if path not in COMMANDS:  # whose parameters are a command's options
            assert len(parameters) <= MOST_PARAMETERS, f"{path}:{node.lineno} has {parameters}"


def test_no_two_classes_have_one_name() -> None:
    homes: dict[str, list[Path]] = defaultdict(list)
    for layer, path in EVERY_MODULE:
        for node in definitions(path) if layer != "agents" else ():  # which are anybody's programs
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(path)
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def constants_of(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the names of constants that a module binds, each with its value as it is written."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = [*zip(target.elts, node.value.elts, strict=True)]
            for name, value in pairs:
                if isinstance(name, ast.Name) and name.id.isupper() and len(name.id) > 1:
                    yield name.id, ast.unparse(value)


@pytest.mark.parametrize("layer", ONE_MEANING)
def test_a_constants_name_has_one_value_in_a_layer(layer: str) -> None:
    bound: dict[str, dict[str, Path]] = defaultdict(dict)
    for path in modules_of(layer):
        for name, value in constants_of(path):
            bound[name][value] = path
    several = {name: [*homes.values()] for name, homes in bound.items() if len(homes) > 1}
    assert several == {}, "name each constant by what it is of"


@every_module
def test_docstrings_are_sentences(layer: str, path: Path) -> None:
    """A function's begins with a verb, a class's and a property's with a noun."""
    for node in definitions(path):
        said = ast.get_docstring(node)
        if said is None or (isinstance(node, ast.ClassDef) and layer == "agents"):
            continue
        where = f"{path}:{node.lineno} {node.name}: {said.splitlines()[0]!r}"
        if is_property(node):
            assert not re.match(r"(Of|By|With|In|To|From|On)\b", said), where
        else:
            assert not FRAGMENT.match(said), where
        if not isinstance(node, ast.ClassDef) and not is_property(node):
            assert not NOUN.match(said), where


@pytest.mark.parametrize("layer", ["tasks", "flows"])
def test_the_files_of_a_run_are_read_and_written_by_storage_alone(layer: str) -> None:
    for path in modules_of(layer):
        name = str(path.relative_to(ROOT))
        if part_of(path, layer) == "storage" or name in OUTSIDE_A_RUN or "template" in path.parts:
            continue
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                called = node.func.attr
                direct = called in FILE_ACCESS and not is_of_run_folder(node)
                assert not direct, (
                    f"{name}:{node.lineno} calls .{called}(); use ratchet.tasks.storage"
                )


def is_of_run_folder(call: ast.Call) -> bool:
    """Return whether the call is `run.exists()`, a method of RunFolder."""
    assert isinstance(call.func, ast.Attribute)
    owner = ast.unparse(call.func.value)
    return call.func.attr == "exists" and not owner.endswith(("path", "file"))


@every_module
def test_event_loops_stand_still_with_their_process(layer: str, path: Path) -> None:
    ours = layer in {"adapters", "tasks", "flows"} and str(path.relative_to(ROOT)) not in FOREIGN
    for node in nodes_of(path) if ours else ():
        if isinstance(node, ast.Call):
            own = ast.unparse(node.func) in OWN_LOOPS
            assert not own, f"line {node.lineno}: use run_event_loop or RunningLoop"


def test_datasets_hold_data_and_no_code() -> None:
    assert list((ROOT / "datasets").rglob("*.py")) == []
