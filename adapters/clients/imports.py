"""Calls that are made once a module has been imported, whoever imports it.

One is needed for the clients of OpenAI and Anthropic. Both leave it to a response model's first use
to build its validator, and Pydantic builds without a lock: a thread that uses the model meanwhile
finds none, and raises a PydanticUserError. Agents of one process play in several threads, so that
error would end a rollout, now and then.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from pydantic import BaseModel

CLIENTS = ("openai._models", "anthropic._models")
"""Modules that define the base of each client's models."""


def when_imported(name: str, then: Callable[[], object]) -> None:
    """Call `then` when the module `name` has been imported: now, if it already is."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Finder(name, then))


@cache
def build_client_models() -> None:
    """Have the models of each client built when they are defined, before any thread uses them."""
    for module in CLIENTS:
        when_imported(module, partial(_build, module))


def _build(module: str) -> None:
    base: type[BaseModel] = sys.modules[module].BaseModel
    base.model_config["defer_build"] = False
    for model in _descendants(base):
        model.model_rebuild()


def _descendants(base: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for model in base.__subclasses__():
        yield model
        yield from _descendants(model)


class _Finder(MetaPathFinder):
    """A finder of one module, which asks the later finders. To find is not yet to import."""

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
