"""Sizes of the product, each with an upper limit: keys of a recipe, lines of a room, files.

A new key takes the place of another one, or shows by a measurement in docs/ what it is worth.
"""

import ast
import re
from collections import Counter

import pytest

from flows.recipe.loading import recipe_options
from tests.test_layers import ROOT, nodes_of

LAYERS = ("flows", "tasks", "adapters", "engine", "durable", "ratchet")
MOST_KEYS = {"train": 142, "finetune": 61, "prefer": 54, "stages": 8, "sweep": 8}
"""Flow → keys of its recipe."""
MOST_LINES = {
    "adapters": 1240, "adapters/clients": 910, "adapters/diagnosis": 1050,
    "adapters/dialects": 2160, "adapters/door": 2460, "adapters/harness": 1560,
    "adapters/network": 320, "adapters/places": 940, "adapters/process": 1310,
    "adapters/programs": 1260, "adapters/project": 440, "adapters/rendering": 1700,
    "adapters/tinker": 2070, "adapters/tracking": 520, "adapters/weights": 280,
    "adapters/wires": 900, "durable": 380, "durable/wire": 520, "engine": 860, "engine/api": 1520,
    "engine/model": 1660, "engine/sampling": 1620, "engine/state": 720, "engine/training": 920,
    "flows": 1580, "flows/cli": 2600, "flows/diagnosis": 440, "flows/estimating": 480,
    "flows/importing": 1380, "flows/recipe": 2065, "flows/runtime": 3395, "flows/server": 1320,
    "ratchet": 120, "tasks": 3450, "tasks/algorithm": 2180, "tasks/comparison": 620,
    "tasks/doors": 820, "tasks/examples": 1160, "tasks/given": 2380, "tasks/recording": 2360,
    "tasks/recovery": 600, "tasks/reports": 4160, "tasks/settings": 1760, "tasks/spending": 1040,
    "tasks/storage": 2080, "tasks/tracking": 860,
}  # fmt: skip
"""Room → lines of its Python and SQL; the room of a layer's own modules has the layer's name."""
MOST = {"files": 384, "classes": 632, "deferred imports": 235}
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
