"""Modules of the user's that are called as a package of Ratchet's, which would take their place."""

import ast
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from threading import Lock

from adapters.errors import UserError

OWN = ("adapters", "durable", "engine", "flows", "pretraining", "ratchet", "tasks")
"""Ratchet's packages."""

_PARSING = Lock()
"""One thread parses at a time: https://github.com/python/cpython/issues/106905."""
_PACKAGES = Path(__file__).resolve().parents[2]
_REMEDY = "rename yours, or move it into a package"


class NameTaken(UserError):
    """Refusal of a module of the user's that has the name of a package of Ratchet's."""


def check_imports(asker: str | Path, folders: Sequence[str]) -> None:
    """Refuse (NameTaken) an agent's file, or a module, that imports a module called as ours is.

    In Ratchet's processes the import would find ours. `folders` have the user's modules, through
    which the import is looked for too; only a name that is among them is refused.
    """
    taken = {name: place for name in OWN if (place := _find(name, folders))}
    if not taken:
        return
    reached = set[str]()
    new = _imports(asker) if isinstance(asker, Path) else {asker.partition(".")[0]}
    while new:
        name = new.pop()
        if name in taken:
            raise NameTaken(
                f"the agent {asker} imports {taken[name]}, and would get Ratchet's own package "
                f"{name!r}; {_REMEDY}"
            )
        reached.add(name)
        new = new.union(*map(_imports, _sources(name, folders))) - reached


def check_folder() -> None:
    """Refuse (NameTaken) a working folder that has a module called as a package of Ratchet's.

    Prefect's deployments and workers look for modules there first, and would not find ours.
    """
    for name in OWN:
        place = _find(name, [""])
        if place and (place.is_file() or (place / "__init__.py").exists()):
            raise NameTaken(
                f"Prefect would import {place} in place of Ratchet's own package {name!r}; "
                f"{_REMEDY}, or give this command in another folder"
            )


def _find(name: str, folders: Sequence[str]) -> Path | None:
    """Return where a module of the user's is; None if there is none, or if it is Ratchet's own."""
    spec = PathFinder.find_spec(name, folders)
    if spec is None:
        return None
    [place, *_] = spec.submodule_search_locations or [spec.origin]
    path = Path(place or name).resolve()
    return None if path.parent == _PACKAGES else path


def _sources(name: str, folders: Sequence[str]) -> Iterator[Path]:
    """Iterate over the files of a module of the user's, or of a whole package."""
    place = _find(name, folders)
    if place is not None:
        yield from place.rglob("*.py") if place.is_dir() else [place]


def _imports(file: Path) -> set[str]:
    """Return the first part of each absolute import of a file; none of one that is no Python."""
    try:
        with _PARSING:
            nodes = [*ast.walk(ast.parse(file.read_bytes()))]
    except (SyntaxError, ValueError):
        return set()
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [
        node.module
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
    ]
    return {name.partition(".")[0] for name in names}
