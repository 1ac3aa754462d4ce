"""Sizes of the product, each with an upper limit.

A new key takes the place of another one, or shows by a measurement in docs/ what it is worth.
"""

import ast
import re

from ratchet.flows.recipe.loading import recipe_options
from tests.test_layers import ROOT, nodes_of

LAYERS = ("flows", "tasks", "adapters", "engine", "durable", "ratchet")
MOST = {"lines": 56_836, "keys": 250, "files": 308, "classes": 536, "deferred imports": 124}
"""Sizes of all layers together, which may fall and not rise; `keys` adds those of every flow."""
FLOWS = ("train", "finetune", "prefer", "stages", "sweep")

FILES = [path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py"))]
IMPORTS = (ast.Import, ast.ImportFrom)


def count_sizes() -> dict[str, int]:
    """Count lines of Python and SQL, keys, files, classes, and imports inside functions."""
    nodes = [node for path in FILES for node in nodes_of(path)]
    functions = (n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    queries = [path for layer in LAYERS for path in (ROOT / layer).rglob("*.sql")]
    keys = [re.findall(r"^  [\w.]+ \(", recipe_options(flow), re.MULTILINE) for flow in FLOWS]
    assert all(keys)
    return {
        "lines": sum(path.read_text(encoding="utf-8").count("\n") for path in (*FILES, *queries)),
        "keys": sum(map(len, keys)),
        "files": len(FILES),
        "classes": sum(isinstance(node, ast.ClassDef) for node in nodes),
        "deferred imports": len(
            {node for one in functions for node in ast.walk(one) if isinstance(node, IMPORTS)}
        ),
    }


def test_the_product_does_not_grow() -> None:
    sizes = count_sizes()
    grown = {name: many for name, many in sizes.items() if many > MOST[name]}
    assert grown == {}, f"who adds takes away; of all: {sizes}"
