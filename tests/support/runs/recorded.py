"""Fixture: runs that a session of tests and all its workers train once, and read as often."""

import os
from collections.abc import Callable
from hashlib import sha256
from shutil import copytree
from typing import TYPE_CHECKING, Any

import pytest

from ratchet.durable.files import lock_file
from tests.support.servers.prefect_server import shown

if TYPE_CHECKING:
    from ratchet.flows.recipe.run_recipe import RunRecipe
    from ratchet.tasks.storage.run_folder import RunFolder

RecordedRun = Callable[["RunRecipe", str], "RunFolder"]
"""A recipe and a name → a run of the recipe in the folder of all runs."""


@pytest.fixture(scope="session")
def recorded_run(
    tmp_path_factory: pytest.TempPathFactory, prefect_server: None, no_tinker: None
) -> RecordedRun:
    """Copy a finished run into the folder of all runs. Who asks for a recipe first trains it."""
    from ratchet.flows.stages import FLOWS
    from ratchet.tasks.storage.run_folder import folder_of

    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def record(recipe: "RunRecipe", name: str) -> "RunFolder":
        of = sha256(recipe.model_dump_json().encode()).hexdigest()
        place = shared / "recorded" / f"{name}-{of}"
        place.mkdir(parents=True, exist_ok=True)
        done = place / "done"
        with (place / "lock").open("w") as lock, pytest.MonkeyPatch.context() as patch, shown():
            lock_file(lock, wait=True)
            patch.setenv("RATCHET_RUNS", str(place))
            if not done.exists():
                trained: Any = FLOWS[recipe.flow]
                trained(recipe, run=name)
                done.touch()
        copied = folder_of(name)
        copytree(place / name, copied.path)
        return copied

    return record
