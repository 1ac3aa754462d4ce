"""Calls that are made once a package has been imported, whoever imports it."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_imported(name: str, then: Callable[[], object]) -> None:
    """Call `then` when the package `name` has been imported: now, if it already is."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder(MetaPathFinder):
    """A finder of one package, which asks the later finders. To find is not yet to import."""

    def __init__(self, name: str, then: Callable[[], object]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (other.find_spec(fullname, path, target) for other in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            loader = spec.loader  # it belongs to this import alone
            execute = self._followed(loader.exec_module)
            loader.exec_module = execute  # pyright: ignore[reportAttributeAccessIssue]
        return spec

    def _followed(self, execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
        def execute_and_tell(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._then()

        return execute_and_tell
