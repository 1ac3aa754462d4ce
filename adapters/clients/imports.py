"""Calls that are made once a module has been imported, whoever imports it.

One is needed for the clients of OpenAI and Anthropic. Both leave it to a response model's first use
to build its validator, and Pydantic builds without a lock: a thread that uses the model meanwhile
finds none, and raises a PydanticUserError. Agents of one process play in several threads, so that
error would end a rollout, now and then.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from pydantic import BaseModel

CLIENTS = ("openai._models", "anthropic._models")
"""Modules that define the base of each client's models."""


def when_imported(name: str, then: Callable[[ModuleType], object]) -> None:
    """Call `then` with the module `name` when it has been imported: now, if it already is."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, then))


@cache
def build_client_models() -> None:
    """Have the models of each client built when they are defined, before any thread uses them."""
    for name in CLIENTS:
        when_imported(name, _build)


def _build(module: ModuleType) -> None:
    module.BaseModel.model_config["defer_build"] = False
    _rebuild_descendants(module.BaseModel)


def _rebuild_descendants(base: type[BaseModel]) -> None:
    for model in base.__subclasses__():
        model.model_rebuild()
        _rebuild_descendants(model)


@dataclass(frozen=True, eq=False)
class _Finder(MetaPathFinder):
    """A finder of one module, which asks the later finders. To find is not yet to import."""

    name: str
    then: Callable[[ModuleType], object]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (other.find_spec(fullname, path, target) for other in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._follow(spec.loader)  # which belongs to this import alone
        return spec

    def _follow(self, loader: Loader) -> None:
        execute = loader.exec_module

        def execute_and_tell(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self.then(module)

        loader.exec_module = execute_and_tell  # pyright: ignore[reportAttributeAccessIssue]
