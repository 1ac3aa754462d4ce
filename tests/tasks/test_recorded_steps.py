"""The recorded steps of a policy: the method of each, and files made again from their sources."""

from pathlib import Path
from shutil import copytree

import pytest

from ratchet.adapters.calls import POLICY
from ratchet.adapters.errors import UserError
from ratchet.adapters.tinker.live_policy import LoraSpec
from ratchet.flows.checkpoints.forks import fork_run
from ratchet.flows.recipe.loading import read_lineage, read_recipe
from ratchet.flows.recipe.recipe import Recipe
from ratchet.tasks.checkpoints import Checkpoint, Ledger
from ratchet.tasks.datums import UpdateMethod
from ratchet.tasks.recording.step_log import read_metrics, record_metrics
from ratchet.tasks.recovery.recorded_steps import RecordedSteps, TrainedPolicy
from ratchet.tasks.settings.algorithm import CreditAssignment
from ratchet.tasks.settings.run import Optimizer
from ratchet.tasks.storage.manifest import write_manifest
from ratchet.tasks.storage.run_folder import RunFolder, folder_of
from tests.support.credited import credited, recorded_steps
from tests.support.runs.recorded_run import CENTRED, record_run
from tests.support.runs.small_recipe import small_recipe

LORA = LoraSpec("base", 4, 0, train_attn=True, train_mlp=True, train_unembed=True)
METHOD = UpdateMethod("importance_sampling", {}, Optimizer(learning_rate=0.1), steps=9)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return record_run(tmp_path_factory.mktemp("run"))


def recorded(
    run: RunFolder, name: str = POLICY, credit: CreditAssignment = CENTRED
) -> RecordedSteps:
    return recorded_steps(run, TrainedPolicy(name, (POLICY,), LORA), credit, METHOD)


@pytest.mark.parametrize("deleted", [1, 2, 3])
def test_deleted_files_are_made_again_byte_for_byte(
    run: RunFolder, tmp_path: Path, deleted: int
) -> None:
    copy = RunFolder(copytree(run.path, tmp_path / "run"))
    names = ["datums/00000.parquet", "trajectories/00000.parquet", "spans/train-00000.0.parquet"]
    for name in names[:deleted]:
        (copy.path / name).unlink()
    assert [len(asked.datums) for asked in recorded(copy).restored(0).request.passes] == [4]
    for name in names:
        assert (copy.path / name).read_bytes() == (run.path / name).read_bytes()


def test_another_policy_s_files_are_made_in_its_own_folder(run: RunFolder, tmp_path: Path) -> None:
    copy = RunFolder(copytree(run.path, tmp_path / "run"))
    assert recorded(copy, "fox").optimizer_steps(1) == 1
    for stage in ("trajectories", "datums"):
        made = copy.path / "policies" / "fox" / stage / "00000.parquet"
        assert made.read_bytes() == (copy.path / stage / "00000.parquet").read_bytes()


def test_datums_are_made_again_by_the_credit_of_their_era(run: RunFolder, tmp_path: Path) -> None:
    copy = RunFolder(copytree(run.path, tmp_path / "run"))
    copy.datums(POLICY, 0).unlink()
    credit = credited("centred", min_group_size=3)
    assert recorded(copy, credit=credit).restored(0).request.passes == []
    assert recorded(copy).optimizer_steps(1) == 0


def test_datums_whose_sources_are_gone_are_refused(tmp_path: Path) -> None:
    steps = recorded(RunFolder(tmp_path))
    assert steps.optimizer_steps(1) is None
    with pytest.raises(UserError, match=r"datums/00000\.parquet is gone, but step 0 must be"):
        steps.restored(0)


def recipe_of_rate(rate: float) -> Recipe:
    return small_recipe(steps=9, optimizer={"learning_rate": rate})


def finish_steps(run: RunFolder, last: int) -> None:
    """Record the metrics and the checkpoints of the steps before `last`."""
    ledger = Ledger(run.checkpoints(POLICY))
    for step in range(len(read_metrics(run.metrics)), last):
        ledger.add(Checkpoint(step + 1, f"tinker://{run.name}/{step + 1}"))
        record_metrics(run.metrics, step, {"datums": 1})


def make_fork(parent: RunFolder, name: str, step: int, rate: float) -> RunFolder:
    recipe = recipe_of_rate(rate)
    return fork_run(parent, name, step, recipe.model_dump(mode="json"), recipe.fingerprint())


def rates(run: RunFolder, steps: int) -> list[float | None]:
    """Return the learning rate by which each step was made."""
    recipes = read_lineage(run, read_recipe(run))
    return [recipes.at(step).update_method().optimizer.learning_rate for step in range(steps)]


@pytest.fixture
def fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run of rate 0.1, forked after 3 steps at rate 0.2, which has done 6 steps."""
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path))
    parent, recipe = folder_of("parent"), recipe_of_rate(0.1)
    write_manifest(parent, recipe.model_dump(mode="json"), recipe.fingerprint())
    finish_steps(parent, 5)
    fork = make_fork(parent, "fork", 3, 0.2)
    finish_steps(fork, 6)
    return fork


def test_the_steps_that_a_fork_shares_were_made_by_its_parent_s_method(fork: RunFolder) -> None:
    assert rates(folder_of("parent"), 5) == [0.1] * 5
    assert rates(fork, 6) == [0.1] * 3 + [0.2] * 3


def test_a_fork_of_a_fork_has_the_methods_of_both_ancestors(fork: RunFolder) -> None:
    assert rates(make_fork(fork, "later", 5, 0.3), 7) == [0.1] * 3 + [0.2] * 2 + [0.3] * 2


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_fork_before_its_parent_s_own_fork_has_nothing_of_the_parent_s_method(
    fork: RunFolder, step: int
) -> None:
    earlier = make_fork(fork, "earlier", step, 0.3)
    assert rates(earlier, 7) == [0.1] * step + [0.3] * (7 - step)
    finish_steps(earlier, 6)
    again = make_fork(earlier, "again", 5, 0.4)
    assert rates(again, 7) == [0.1] * step + [0.3] * (5 - step) + [0.4] * 2
