"""Runs of the flow that nothing interrupts, and runs that die and go on."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from benchmarks.interruptions.compare_runs import list_faults, read_contents
from ratchet.flows.recipe.recipe import Recipe
from ratchet.flows.recipe.run_recipe import RunRecipe
from ratchet.flows.train import train
from ratchet.tasks.storage.run_folder import RunFolder
from tests.support.runs.recorded import RecordedRun
from tests.support.servers.dying_engine import ending_the_run


@contextmanager
def train_whole(recipe: Recipe, root: Path) -> Iterator[RunFolder]:
    """Train the run `whole` in a folder of runs, which is the one of the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RATCHET_RUNS", str(root))
        train(recipe, run="whole")
        yield RunFolder(root / "whole")


def fixture_of(recipe: RunRecipe) -> object:
    """Return a fixture for a test module's `whole`: a recorded run of the recipe."""

    @pytest.fixture(scope="module")
    def whole(
        tmp_path_factory: pytest.TempPathFactory, recorded_run: RecordedRun
    ) -> Iterator[RunFolder]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RATCHET_RUNS", str(tmp_path_factory.mktemp("runs")))
            yield recorded_run(recipe, "whole")

    return whole


def die(recipe: Recipe, killed: AbstractContextManager[None], root: Path) -> RunFolder:
    """Train a run whose engine is killed, which ends it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RATCHET_RUNS", str(root))
        with killed, ending_the_run():
            train(recipe, run="broken")
    return RunFolder(root / "broken")


def die_and_go_on(recipe: Recipe, killed: AbstractContextManager[None], root: Path) -> RunFolder:
    """Train a run whose engine is killed, which goes on to its end."""
    with pytest.MonkeyPatch.context() as patch, killed:
        patch.setenv("RATCHET_RUNS", str(root))
        train(recipe, run="broken")
    return RunFolder(root / "broken")


def differences(broken: RunFolder, whole: RunFolder) -> list[str]:
    """List what a run that died has repeated, or has other than one that did not."""
    return list_faults(broken, read_contents(whole))
