"""Sizes of the product, each with an upper limit: keys of a recipe, lines of a room, files.

A new key takes the place of another one, or shows by a measurement in docs/ what it is worth.
"""

import ast
import re
from collections import Counter

import pytest

from flows.recipe.loading import recipe_options
from tests.test_layers import ROOT, nodes_of

LAYERS = ("flows", "tasks", "adapters", "engine", "ratchet")
MOST_KEYS = {"train": 125, "finetune": 55, "prefer": 48, "stages": 8, "sweep": 9}
"""Flow → keys of its recipe."""
MOST_LINES = {
    "adapters": 1124, "adapters/clients": 571, "adapters/dialects": 1445, "adapters/door": 1891,
    "adapters/harness": 1869, "adapters/network": 308, "adapters/process": 835,
    "adapters/project": 335, "adapters/rendering": 1646, "adapters/tinker": 1696,
    "adapters/tracking": 560, "adapters/weights": 278, "engine": 824, "engine/api": 1481,
    "engine/model": 1479, "engine/sampling": 1663, "engine/state": 571, "engine/training": 533,
    "flows": 1399, "flows/cli": 2228, "flows/comparison": 208, "flows/importing": 1389,
    "flows/recipe": 3166, "flows/runtime": 2832, "flows/server": 1026, "ratchet": 112,
    "tasks": 3207, "tasks/algorithm": 1843, "tasks/comparison": 592, "tasks/examples": 1151,
    "tasks/exports": 223, "tasks/judging": 339, "tasks/pairs": 1030, "tasks/recording": 1576,
    "tasks/recovery": 575, "tasks/reports": 3755, "tasks/settings": 142, "tasks/storage": 1775,
    "tasks/texts": 1465, "tasks/tracking": 438,
}  # fmt: skip
"""Room → lines of its Python and SQL; the room of a layer's own modules has the layer's name."""
MOST = {"files": 351, "classes": 493, "deferred imports": 213}
"""Sizes of all layers together."""

FILES = [path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py"))]
IMPORTS = (ast.Import, ast.ImportFrom)


def count_lines() -> Counter[str]:
    """Count the lines of each room."""
    lines = Counter[str]()
    for path in (*FILES, *(path for layer in LAYERS for path in (ROOT / layer).rglob("*.sql"))):
        room = "/".join(path.relative_to(ROOT).parts[:-1][:2])
        lines[room] += path.read_text(encoding="utf-8").count("\n")
    return lines


def count_sizes() -> dict[str, int]:
    """Count the files, their classes, and their imports inside functions."""
    nodes = [node for path in FILES for node in nodes_of(path)]
    functions = (n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return {
        "files": len(FILES),
        "classes": sum(isinstance(node, ast.ClassDef) for node in nodes),
        "deferred imports": len(
            {node for one in functions for node in ast.walk(one) if isinstance(node, IMPORTS)}
        ),
    }


@pytest.mark.parametrize("flow", MOST_KEYS)
def test_a_new_key_takes_the_place_of_another(flow: str) -> None:
    keys = re.findall(r"^  [\w.]+ \(", recipe_options(flow), re.MULTILINE)
    assert 0 < len(keys) <= MOST_KEYS[flow]


def test_rooms_do_not_grow() -> None:
    lines = count_lines()
    grown = {room: many for room, many in lines.items() if many > MOST_LINES.get(room, 0)}
    assert grown == {}, f"take lines away, or from another room's limit; of all: {dict(lines)}"


def test_the_layers_have_few_files_classes_and_deferred_imports() -> None:
    sizes = count_sizes()
    assert {name: many for name, many in sizes.items() if many > MOST[name]} == {}
