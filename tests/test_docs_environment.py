"""docs/environment.md: every variable that the product reads or sets, once."""

import ast
import re
from collections import Counter
from collections.abc import Iterator

from tests.test_layers import ROOT
from tests.test_sizes import FILES

NAME = re.compile(r"[A-Z][A-Z0-9]+(?:_[A-Z0-9]+)*")
OTHERS = {
    *("BYTE_STREAM_SPLIT", "CAUSAL_LM", "FETCH_HEAD", "SC_PAGE_SIZE"),
    *("FAILED_PRECONDITION", "INVALID_ARGUMENT", "MAX_TOKENS", "NOT_FOUND", "PERMISSION_DENIED"),
}
"""Words of files, systems and APIs that are written like a variable."""
NODES = [
    node
    for path in FILES
    if "template" not in path.parts
    for node in ast.walk(ast.parse(path.read_text("utf-8")))
]
CONSTANTS = {
    target.id: node.value
    for node in NODES
    if isinstance(node, ast.Assign)
    for target in node.targets
    if isinstance(target, ast.Name) and target.id.isupper()
}


def texts_of(node: ast.AST) -> set[str]:
    """Return the texts of a node, or of the constant that it names."""
    named = CONSTANTS.get(node.id, node) if isinstance(node, ast.Name) else node
    return {
        one.value
        for one in ast.walk(named)
        if isinstance(one, ast.Constant) and isinstance(one.value, str)
    }


def is_environment(node: ast.AST) -> bool:
    return any(isinstance(one, ast.Attribute) and one.attr == "environ" for one in ast.walk(node))


def names_read() -> Iterator[str]:
    """Yield what is asked of the environment, and every text that is written like a variable."""
    for node in NODES:
        if isinstance(node, ast.Subscript) and is_environment(node.value):
            yield from texts_of(node.slice)
        elif isinstance(node, ast.Compare) and is_environment(node.comparators[0]):
            yield from texts_of(node.left)
        elif isinstance(node, ast.Call) and is_environment(node.func) and node.args:
            yield from texts_of(node.args[0])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "_" in node.value:
            yield node.value


def test_the_page_lists_every_variable_that_is_read_once() -> None:
    page = (ROOT / "docs" / "environment.md").read_text("utf-8")
    listed = Counter(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    read = {name for name in names_read() if NAME.fullmatch(name)} - OTHERS
    assert {name for name, count in listed.items() if count > 1} == set()
    assert {name for name in read if not name.startswith("RLIMIT_")} == {*listed}
