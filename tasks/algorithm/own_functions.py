"""Losses and advantages of the user's project, by the names `module:function`.

A recipe holds such a name with a checksum of the module's file, as `module:function@checksum`, so
that a run is bound to the source as it is to any value of its recipe.
"""

import re
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import TypeVar

from ratchet.adapters.errors import UserError
from ratchet.adapters.project.modules import load_module, source_of

CHECKSUM = 12
"""Digits of a checksum."""

PATTERN = rf"^[A-Za-z_]\w*(\.\w+)*:\w+(@[0-9a-f]{{{CHECKSUM}}})?$"
"""Pattern of a name, in a recipe's schema too."""

_imported: dict[str, str] = {}
"""Module → the checksum of its file when this process imported it."""

Row = TypeVar("Row")


class OwnFunctionError(UserError):
    """An error for a loss or an advantage of the project that is not there, or not as it was."""


def is_own(name: str) -> bool:
    """Tell a name of the project from one of a table."""
    return re.match(PATTERN, name) is not None


def bind_source(name: str) -> str:
    """Return a name of the project with the checksum of its source, and any other as it is."""
    if not is_own(name) or "@" in name:
        return name
    return f"{name}@{_load(name)[1]}"


def check_source(name: str) -> None:
    """Raise OwnFunctionError if a name's source is gone, or is not the one that it is bound to."""
    if not is_own(name):
        return
    module, source = _load(name)
    if "@" in name and not name.endswith(f"@{source}"):
        raise OwnFunctionError(
            f"the recipe has {name}, and the file {module.__file__} has the checksum {source}: it "
            "was edited since; restore it, or give the name without a checksum to a new run"
        )


def is_as_bound(name: str) -> bool:
    """Return whether a name is of a table, or its source is there and is the one it is bound to."""
    try:
        check_source(name)
    except UserError:  # also of a module that cannot be imported
        return False
    return True


def find_own(name: str, make: Callable[[object], Row]) -> Row:
    """Return the row that is made of what a name of the project means.

    OwnFunctionError if there is no such thing. The recipe of a run may be bound to a source that is
    gone: its row is there, and a call of its function raises OwnFunctionError.
    """
    if "@" in name and not is_as_bound(name):
        return make(partial(_refuse, name))
    module, _ = _load(name)
    attribute = name.partition(":")[2].partition("@")[0]
    found = getattr(module, attribute, None)
    if found is None:
        raise OwnFunctionError(f"{module.__file__} has no {attribute!r}; mend {name}")
    return make(found)


def _refuse(name: str, *_: object) -> None:
    check_source(name)


def _load(name: str) -> tuple[ModuleType, str]:
    """Import the module of a name; return it with the checksum of its file."""
    module_name = name.partition(":")[0]
    module = load_module(module_name)
    if module is None or module.__file__ is None:
        raise OwnFunctionError(
            f"{name} is of a module {module_name!r} that is not there; name a file of agents/, or "
            "a module of the project's folder, as MODULE:FUNCTION"
        )
    source = source_of(module)[:CHECKSUM]
    if _imported.setdefault(module.__name__, source) != source:
        raise OwnFunctionError(
            f"{module.__file__} was edited since this process has imported it; start the process "
            "anew (in a notebook, its kernel)"
        )
    return module, source
