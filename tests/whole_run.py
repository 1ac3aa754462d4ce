"""Runs of the flow that nothing interrupts, and runs that die and go on."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from adapters.errors import EngineDied
from benchmarks.interruptions.compare_runs import list_faults, read_contents
from flows.recipe.recipe import Recipe
from flows.train import train
from tasks.storage.run_folder import RunFolder


@contextmanager
def train_whole(recipe: Recipe, root: Path) -> Iterator[RunFolder]:
    """Train the run `whole` in a folder of runs, which is the one of the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RATCHET_RUNS", str(root))
        train(recipe, run="whole")
        yield RunFolder(root / "whole")


def fixture_of(recipe: Recipe) -> object:
    """Return a fixture for a test module's `whole`: a run of the recipe, trained once."""

    @pytest.fixture(scope="module")
    def whole(
        tmp_path_factory: pytest.TempPathFactory, prefect_server: None, no_tinker: None
    ) -> Iterator[RunFolder]:
        with train_whole(recipe, tmp_path_factory.mktemp("runs")) as run:
            yield run

    return whole


def die(recipe: Recipe, killed: AbstractContextManager[None], root: Path) -> RunFolder:
    """Train a run whose engine is killed, which ends it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RATCHET_RUNS", str(root))
        with killed, pytest.raises(EngineDied, match="ended with code -9"):
            train(recipe, run="broken")
    return RunFolder(root / "broken")


def die_and_go_on(
    recipe: Recipe, killed: AbstractContextManager[None], root: Path, whole: RunFolder
) -> RunFolder:
    """Train a run whose engine is killed, and continue it: it must end as the run `whole` did."""
    broken = die(recipe, killed, root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RATCHET_RUNS", str(root))
        train(recipe, run="broken")
    faults = list_faults(broken, read_contents(whole))
    assert not faults, faults
    return broken
