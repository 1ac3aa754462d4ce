"""A run has one owner: the process that opened it last, whatever became of the lock."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ratchet.adapters.errors import UserError
from ratchet.tasks.checkpoints import Checkpoint, Ledger
from ratchet.tasks.storage.logs import read_log
from ratchet.tasks.storage.manifest import bind_run
from ratchet.tasks.storage.owners import last_owner
from ratchet.tasks.storage.run_folder import RunError, RunFolder
from tests.support.runs.small_recipe import small_recipe

RECIPE = small_recipe()
ROOT = Path(__file__).parents[2]
OPENING = """
import os, sys
from ratchet.tasks.storage.manifest import bind_run
from tests.support.runs.small_recipe import small_recipe

recipe = small_recipe()
with bind_run(sys.argv[1], recipe.model_dump(mode="json"), recipe.fingerprint()) as run:
    print(os.getpid(), flush=True)
    sys.stdin.read()
"""


pytestmark = pytest.mark.usefixtures("runs")


@pytest.fixture
def owned() -> Iterator[RunFolder]:
    with bind_run("one", RECIPE.model_dump(mode="json"), RECIPE.fingerprint()) as run:
        yield run


def open_elsewhere(name: str) -> "subprocess.Popen[str]":
    """Open a run in another process, which has it until its stdin ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", OPENING, name],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_each_process_that_opens_a_run_is_its_next_owner(owned: RunFolder) -> None:
    owned.check_owner()
    again = owned.take_over()
    again.check_owner()
    assert [row["epoch"] for row in read_log(owned.owners)] == [1, 2]


def test_whoever_was_taken_over_stops_at_its_next_write_and_names_the_new_owner(
    owned: RunFolder,
) -> None:
    ledger = Ledger(owned.checkpoints("policy"), owned.ownership)
    ledger.begin(1)
    (owned.path / "lock").unlink()
    with open_elsewhere("one") as other:
        said = rf"was taken over by process {other.pid} on .*, in {owned.path}"
        for write in (
            lambda: ledger.begin(2),
            lambda: ledger.add(Checkpoint(1, "tinker://r/s/1")),
            owned.check_owner,
        ):
            with pytest.raises(UserError, match=said):
                write()
        other.communicate("")
    assert [line["phase"] for line in read_log(owned.checkpoints("policy"))] == ["intent"]


def test_a_checkpoint_has_a_name_that_no_other_owner_gives(owned: RunFolder) -> None:
    names = [
        Ledger(owned.checkpoints("policy"), run.ownership).name(5)
        for run in (owned, owned.take_over(), owned.take_over())
    ]
    assert len({*names}) == 3
    assert [name.rpartition("-")[0] for name in names] == ["00005-1", "00005-2", "00005-3"]
    assert Ledger(owned.checkpoints("policy")).name(5) == "00005"


def test_the_ledger_names_the_epoch_of_whoever_wrote_a_line(owned: RunFolder) -> None:
    Ledger(owned.checkpoints("policy"), owned.ownership).begin(1)
    Ledger(owned.checkpoints("policy"), owned.take_over().ownership).begin(1)
    assert [line["epoch"] for line in read_log(owned.checkpoints("policy"))] == [1, 2]


def test_a_copy_of_a_run_that_is_open_is_refused(runs: Path, owned: RunFolder) -> None:
    shutil.copytree(owned.path, runs / "copy")
    with (
        pytest.raises(RunError, match=rf"{runs / 'copy'} is a copy of {owned.path}, which process"),
        bind_run("copy", RECIPE.model_dump(mode="json"), RECIPE.fingerprint()),
    ):
        pass


def test_a_copy_of_a_run_that_is_closed_is_opened_with_a_warning(
    runs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with bind_run("one", RECIPE.model_dump(mode="json"), RECIPE.fingerprint()) as run:
        pass
    shutil.copytree(run.path, runs / "copy")
    with bind_run("copy", RECIPE.model_dump(mode="json"), RECIPE.fingerprint()) as copy:
        owner = last_owner(copy.owners)
        assert owner is not None
        assert (owner.epoch, owner.folder) == (2, str(copy.path))
    (warning,) = [
        record.message for record in caplog.records if record.name.startswith("ratchet.tasks")
    ]
    assert f"the run {copy.path} was open last in process" in warning
    assert str(run.path) in warning


def test_what_a_killed_writer_left_is_swept_when_the_run_is_opened(runs: Path) -> None:
    with bind_run("one", RECIPE.model_dump(mode="json"), RECIPE.fingerprint()) as run:
        pass
    ours = run.datums("policy", 0).with_name(".00000.parquet.0a1b2c3d.partial")
    engines = run.engine / "checkpoints" / ".x.json.0a1b2c3d.partial"
    for left in (ours, engines):
        left.parent.mkdir(parents=True)
        left.write_text(json.dumps({}))
    with bind_run("one", RECIPE.model_dump(mode="json"), RECIPE.fingerprint()):
        assert not ours.exists()
        assert engines.exists()
