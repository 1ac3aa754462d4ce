"""The architecture, checked: who may import whom, and how long a function may be."""

import ast
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = {
    "flows": {"flows", "tasks", "adapters"},
    "tasks": {"tasks", "adapters"},
    "adapters": {"adapters"},
    "engine": {"engine"},
    "agents": set(),
}
# The base model that ships is made by the engine, so its pretraining is the one path that needs it.
BUILDS_THE_ENGINE = {"tasks/pretraining.py"}
ONLY_IN = {
    "prefect": {"flows", "tasks"},
    "torch": {"engine"},
    "transformers": {"engine"},
}
LONGEST_FUNCTION = 50
LONGEST_FILE = 400


def modules_of(layer: str) -> list[Path]:
    return sorted((ROOT / layer).rglob("*.py"))


EVERY_MODULE = [(layer, path) for layer in LAYERS for path in modules_of(layer)]
every_module = pytest.mark.parametrize(
    ("layer", "path"), EVERY_MODULE, ids=[str(path.relative_to(ROOT)) for _, path in EVERY_MODULE]
)


def imported_roots(path: Path) -> set[str]:
    roots = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            roots |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively; name the package"
            roots.add((node.module or "").split(".")[0])
    return roots


@every_module
def test_imports_point_downward(layer: str, path: Path) -> None:
    allowed = set(LAYERS[layer])
    if str(path.relative_to(ROOT)) in BUILDS_THE_ENGINE:
        allowed.add("engine")
    ours = imported_roots(path) & LAYERS.keys()
    assert ours <= allowed, f"{path} may not import {sorted(ours - allowed)}"


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
