"""Rows of the tables of losses and of advantages, and of the user's project, and their settings.

A recipe has the name of a loss or an advantage of the project, `module:function`, with a checksum
of the module's file, as `module:function@checksum`, so that a run is bound to the source as it is
to any value of its recipe.
"""

import re
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf
from types import MappingProxyType, ModuleType
from typing import Any, TypeVar

from ratchet.adapters.errors import UserError, did_you_mean, instead_of
from ratchet.adapters.project.modules import load_module, source_of

Settings = Mapping[str, float | str]

UsedBy = tuple[str, tuple[str, ...]] | None
"""(setting, values): a row reads this one only if that setting has one of the values.

None: a row always reads it. `("clip", ("ring",))` belongs to a setting of ring clipping alone.
"""

TableRow = TypeVar("TableRow")


@dataclass(frozen=True)
class Number:
    """A number: its default, and the bounds that it lies within, both included."""

    default: float
    least: float = -inf
    most: float = inf
    used_by: UsedBy = None

    def admits(self, value: float | str) -> bool:
        return not isinstance(value, str) and self.least <= value <= self.most

    def __str__(self) -> str:
        return f"a number from {self.least:g} to {self.most:g}"


@dataclass(frozen=True)
class Option:
    """Choice between names, with the name that is the default."""

    default: str
    names: tuple[str, ...]
    used_by: UsedBy = None

    def admits(self, value: float | str) -> bool:
        return value in self.names

    def __str__(self) -> str:
        return f"one of {', '.join(self.names)}"


Known = Mapping[str, Number | Option]
ANY: Known = MappingProxyType({})
"""Settings of a row that reads whichever are given."""


class NotedSettings(dict[str, float | str]):
    """Settings that note which of them were `read`."""

    def __init__(self, given: Settings) -> None:
        super().__init__(given)
        self.read = set[str]()

    def __getitem__(self, name: str) -> float | str:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)

    def refuse_ignored(self, owner: str) -> None:
        """Refuse (ValueError) settings that the owner has not read."""
        if ignored := sorted(self.keys() - self.read):
            raise ValueError(f"{owner} would ignore {', '.join(ignored)}; remove them")


def find_row(kind: str, name: str, table: Mapping[str, TableRow]) -> TableRow:
    """Return the row of a name in a table of a kind, such as loss; ValueError if it has none."""
    if name not in table:
        near = instead_of(f"{kind} {name}") or did_you_mean(name, table)
        raise ValueError(f"no {kind} '{name}' (there is: {', '.join(table)}){near}")
    return table[name]


def complete_settings(owner: str, given: Settings, known: Known) -> dict[str, float | str]:
    """Return the given settings and the defaults of the others.

    ValueError if the owner (in words, as 'the loss ppo') does not read a setting, or not its value.
    """
    complete, read = _complete(given, known)
    if ignored := sorted(given.keys() - read):
        raise ValueError(
            f"{owner} would ignore {', '.join(ignored)} (it reads: {', '.join(read) or 'none'}); "
            "remove them or choose another one"
        )
    for name, value in given.items():
        if known is not ANY and not known[name].admits(value):
            raise ValueError(f"{owner} needs {known[name]} as its {name}, not {value!r}")
    return complete


def used_settings(given: Settings, known: Known) -> dict[str, float | str]:
    """Return the given settings that the row reads."""
    _, read = _complete(given, known)
    return {name: value for name, value in given.items() if name in read}


def _complete(given: Settings, known: Known) -> tuple[dict[str, float | str], list[str]]:
    """Add the defaults to the given settings; return also the names that the row reads."""
    if known is ANY:
        return {**given}, [*given]
    complete = {name: given.get(name, setting.default) for name, setting in known.items()}
    return complete, [
        name
        for name, setting in known.items()
        if setting.used_by is None or complete[setting.used_by[0]] in setting.used_by[1]
    ]


CHECKSUM = 12
"""Digits of a checksum."""

PATTERN = rf"^[A-Za-z_]\w*(\.\w+)*:\w+(@[0-9a-f]{{{CHECKSUM}}})?$"
"""Pattern of a name, in a recipe's schema too."""


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
            "was edited since; restore it, or give the name without a checksum to a fork"
        )


def is_as_bound(name: str) -> bool:
    """Return whether a name is of a table, or its source is there and is the one it is bound to."""
    try:
        check_source(name)
    except UserError:  # also of a module that cannot be imported
        return False
    return True


def find_own(name: str, make: Callable[[object], TableRow]) -> TableRow:
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


@contextmanager
def calling(kind: str, name: str, returned: str) -> Generator[None, None, None]:
    """Have what a function of the project raises, its exit too, be told as OwnFunctionError."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit, GeneratorExit) as error:  # the user's code may raise anything
        raise OwnFunctionError(
            f"the {kind} {name} raises {error!r}, or returns no {returned}; mend it, or give "
            f"algorithm.{kind}_settings what it reads"
        ) from error


def _load(name: str) -> tuple[ModuleType, str]:
    """Import the module of a name; return it with the checksum of its file."""
    module_name = name.partition(":")[0]
    module = load_module(module_name)
    if module is None or module.__file__ is None:
        raise OwnFunctionError(
            f"{name} is of a module {module_name!r} that is not there; name a file of agents/, or "
            "a module of the project's folder, as MODULE:FUNCTION"
        )
    return module, source_of(module)[:CHECKSUM]
