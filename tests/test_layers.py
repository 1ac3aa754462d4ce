"""Checks of the architecture: allowed imports, and the length of functions and files."""

import ast
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = {
    "flows": {"flows", "tasks", "adapters", "pretraining"},
    "pretraining": {"pretraining", "tasks", "adapters", "engine"},
    "tasks": {"tasks", "adapters"},
    "adapters": {"adapters"},
    "engine": {"engine"},
    "agents": set(),
}
ENGINE_ARROWS = {
    "__main__": {"api", "model", "state", "errors"},
    "api": {"core", "training", "sampling", "state", "model", "randomness", "errors"},
    "core": {"training", "sampling", "state", "model", "errors"},
    "training": {"model", "errors"},
    "sampling": {"model", "randomness", "errors"},
    "state": {"model", "errors"},
    "model": {"randomness", "errors"},
    "randomness": set(),
    "errors": set(),
}
"""Part of the engine (sub-package or module) → the other parts that it may import."""
WITHOUT_CIRCLES = ("engine", "pretraining")
ONLY_IN = {
    "prefect": {"flows", "tasks", "pretraining"},
    "torch": {"engine", "pretraining"},
    "transformers": {"engine", "pretraining"},
}
MOST_FILES_IN_A_FOLDER = 15
LONGEST_FUNCTION = 50
LONGEST_FILE = 400


def modules_of(layer: str) -> list[Path]:
    return sorted((ROOT / layer).rglob("*.py"))


EVERY_MODULE = [(layer, path) for layer in LAYERS for path in modules_of(layer)]
every_module = pytest.mark.parametrize(
    ("layer", "path"), EVERY_MODULE, ids=[str(path.relative_to(ROOT)) for _, path in EVERY_MODULE]
)


def imported_names(path: Path) -> set[str]:
    """Return all imported names, also those imported in functions or under TYPE_CHECKING."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively; name the package"
            names |= {f"{node.module}.{name.name}" for name in node.names}
    return names


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


def engine_part(path: Path) -> str:
    return path.relative_to(ROOT / "engine").with_suffix("").parts[0]


@every_module
def test_imports_point_downward(layer: str, path: Path) -> None:
    ours = imported_roots(path) & LAYERS.keys()
    assert ours <= LAYERS[layer], f"{path} may not import {sorted(ours - LAYERS[layer])}"


@pytest.mark.parametrize("part", ENGINE_ARROWS)
def test_imports_between_the_parts_of_the_engine_point_one_way(part: str) -> None:
    for path in modules_of("engine"):
        if engine_part(path) == part:
            imported = {engine_part(module) for module in imported_modules(path, "engine")}
            forbidden = imported - ENGINE_ARROWS[part] - {part}
            assert not forbidden, f"{path} may not import {sorted(forbidden)} of the engine"


def test_every_part_of_the_engine_has_its_arrows() -> None:
    parts = {engine_part(path) for path in modules_of("engine")} - {"__init__"}
    assert parts == ENGINE_ARROWS.keys()
    TopologicalSorter(ENGINE_ARROWS).prepare()


@pytest.mark.parametrize("layer", WITHOUT_CIRCLES)
def test_no_modules_import_each_other_in_a_circle(layer: str) -> None:
    graph = {path: imported_modules(path, layer) - {path} for path in modules_of(layer)}
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("layer", WITHOUT_CIRCLES)
def test_folders_hold_few_files(layer: str) -> None:
    for folder in {path.parent for path in modules_of(layer)}:
        files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(files) <= MOST_FILES_IN_A_FOLDER, f"{folder} holds {len(files)} files"


@every_module
def test_heavy_frameworks_stay_in_their_layers(layer: str, path: Path) -> None:
    for framework, homes in ONLY_IN.items():
        assert layer in homes or framework not in imported_roots(path)


@every_module
def test_functions_and_files_are_short(layer: str, path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= LONGEST_FILE
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= LONGEST_FUNCTION, (
                f"{path}:{node.lineno} {node.name} has {length} lines"
            )


def test_datasets_hold_data_and_no_code() -> None:
    assert list((ROOT / "datasets").rglob("*.py")) == []


def test_no_flow_is_named_like_a_dependency() -> None:
    installed = packages_distributions().keys() - LAYERS.keys()
    assert {path.stem for path in modules_of("flows")}.isdisjoint(installed)
