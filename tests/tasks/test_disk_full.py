"""A full disk stops the writing and not the run: when there is space again, everything is there."""

import asyncio
import errno
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from ratchet.adapters.calls import Completion
from ratchet.adapters.door.batches import DueRollout
from ratchet.adapters.door.door import Door
from ratchet.adapters.errors import UserError
from ratchet.adapters.harness.player import play_batch
from ratchet.adapters.player_protocol import PlaySettings
from ratchet.adapters.weights.adapter import Adapter, write_adapter
from ratchet.flows.cli.main import plain_errors
from ratchet.tasks.recording import journal as journals
from ratchet.tasks.recording.journal import Journal, JournalError, read_journal
from ratchet.tasks.recording.spans import call_span
from ratchet.tasks.rollouts import RolloutHost, collect_rollouts
from ratchet.tasks.storage.files import appearing_folder
from ratchet.tasks.storage.run_folder import RunError, RunFolder, folder_of
from ratchet.tasks.storage.tables import read_table
from tests.support.door.door_batches import ListRecorder
from tests.support.door.opened_door import open_door, opened_batch
from tests.support.door.played_batch import BATCH, PAIRS, Stage, write_examples
from tests.support.processes import wait_until
from tests.tasks.test_journal import append_now, call
from tests.tasks.test_recorded import EXAMPLE, talks

SAID = "the disk of {} is full; writing goes on when there is space"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "FULL_SECONDS", 0.02)


def fill(disk: Path) -> Path:
    """A file that takes all the space there is."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"x" * 512)
    return ballast


def free_later(ballast: Path, wait: Callable[[], object]) -> threading.Thread:
    """Free the disk, in a thread, when a wait is over."""

    def free() -> None:
        wait()
        ballast.unlink()

    thread = threading.Thread(target=free)
    thread.start()
    return thread


def free_when_full(ballast: Path, journal: Journal) -> threading.Thread:
    """Free the disk when a journal has met it full."""
    return free_later(ballast, lambda: wait_until("a full disk", lambda: journal.full))


def test_appends_wait_while_the_disk_is_full_and_none_is_lost(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = small_disk / "j.jsonl"

    with Journal(path) as journal:
        append_now(journal, call(0))
        ballast = fill(small_disk)
        freeing = free_when_full(ballast, journal)
        for written in [journal.append(call(number)) for number in range(600, 604)]:
            written.result()
        assert not ballast.exists()
        append_now(journal, call(9))
    freeing.join()
    assert [span["call"] for span in read_journal(path)] == [0, *range(600, 604), 9]
    said = [record.message for record in caplog.records if record.name.startswith("ratchet.tasks")]
    assert said == [SAID.format(path)], "it is said once"


def test_a_line_that_only_partly_fitted_is_cut_before_it_is_written_again(small_disk: Path) -> None:
    path = small_disk / "j.jsonl"
    with Journal(path) as journal:
        append_now(journal, call(0))
        whole = path.stat().st_size
        ballast = fill(small_disk)
        added = threading.Thread(target=append_now, args=(journal, long_call()))
        added.start()
        wait_until("a full disk", lambda: journal.full)
        wait_until("the cut of what was written of it", lambda: path.stat().st_size == whole)
        ballast.unlink()
        added.join(60)
    assert [span["call"] for span in read_journal(path)] == [0, 2000]


def long_call() -> dict:
    """A span of some pages, so that a part of it fits where the whole does not."""
    return call(2000)


def test_a_journal_that_is_closed_while_the_disk_is_full_gives_up(small_disk: Path) -> None:
    journal = Journal(small_disk / "j.jsonl")
    ballast, errors = fill(small_disk), []

    def add() -> None:
        try:
            append_now(journal, long_call())
        except JournalError as error:
            errors.append(str(error))

    added = threading.Thread(target=add)
    added.start()
    wait_until("a full disk", lambda: journal.full)
    journal.close()
    added.join(60)
    ballast.unlink()
    assert len(errors) == 1
    assert "No space left on device" in errors[0]
    assert read_journal(journal.path) == []


class JournalledCalls(ListRecorder):
    """Recorder whose completions are spans of a journal."""

    def __init__(self, journal: Journal) -> None:
        super().__init__([DueRollout("train-00000-0000-00", {})])
        self._journal = journal

    async def answered(self, completion: Completion) -> None:
        await asyncio.wrap_future(self._journal.append(call_span(completion)))


def test_an_answer_waits_at_the_door_until_it_is_on_disk(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = small_disk / "j.jsonl"
    with (
        Journal(path) as journal,
        open_door() as door,
        opened_batch(door, JournalledCalls(journal)) as opened,
    ):
        opened.ask()
        ballast = fill(small_disk)
        freeing = free_when_full(ballast, journal)
        answer = opened.ask(user="x" * 5000)  # the field is recorded, so a page and more
        assert not ballast.exists()
        freeing.join()
    first, second = read_journal(path)
    assert second["gen_ai_response_id"] == answer.id != first["gen_ai_response_id"]
    assert SAID.format(path) in caplog.messages


def test_the_time_of_a_rollout_does_not_run_while_the_disk_is_full(
    small_disk: Path, tmp_path: Path, stage: Stage
) -> None:
    journals_on, rest = RunFolder(small_disk), RunFolder(tmp_path)
    journals_on.journal(BATCH).parent.mkdir()
    journals_on.journal(BATCH).touch()
    shard = write_examples(rest, [EXAMPLE])
    settings = PlaySettings(f"{talks.__module__}:{talks.__name__}", ["policy"], 2, 5)
    freeing = free_later(fill(small_disk), lambda: time.sleep(7))
    with Door(stage.chat, {}, run_seed=0) as door:
        server = RolloutHost(journals_on, door, stage.service, settings)
        collect_rollouts.make(rest.spans(BATCH), shard, PAIRS, server, stage.sampled_by, play_batch)
    freeing.join()
    rows = read_table(rest.spans(BATCH)).to_pylist()
    assert [row["kind"] for row in rows if row["kind"] != "llm"] == ["reward"] * 2


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_sync_that_finds_no_space_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Some file systems tell only then."""
    sync, failures = os.fsync, iter([code, code])

    def full(file: int) -> None:
        failure = next(failures, None)
        if failure is not None:
            raise OSError(failure, "full")
        sync(file)

    path = tmp_path / "j.jsonl"
    with Journal(path) as journal:
        monkeypatch.setattr(os, "fsync", full)
        append_now(journal, call(0))
        append_now(journal, call(1))
    assert [span["call"] for span in read_journal(path)] == [0, 1]


def test_a_folder_on_a_full_disk_leaves_nothing(small_disk: Path) -> None:
    out = small_disk / "out"
    adapter = Adapter(1, 1, {"a": (torch.zeros(1, 2**16), torch.zeros(1, 1))}, head="a")
    for write in (
        lambda folder: (folder / "one").write_bytes(b"x" * 2**17),
        lambda folder: write_adapter(adapter, folder),
    ):
        with pytest.raises(OSError, match="No space"), appearing_folder(out) as folder:
            write(folder)
    assert list(small_disk.iterdir()) == []
    with appearing_folder(out) as folder:
        (folder / "one").write_bytes(b"x")
    with pytest.raises(UserError, match="exists, and is not written over"), appearing_folder(out):
        pytest.fail("a folder that exists was begun")
    assert (out / "one").read_bytes() == b"x"


def test_a_full_disk_is_a_sentence_and_keeps_no_run_from_its_lock(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RATCHET_RUNS", str(small_disk))
    ballast = fill(small_disk)
    with pytest.raises(SystemExit, match="2"), plain_errors():
        ballast.with_name("more").write_bytes(b"x" * 2**17)
    assert "the disk is full (No space left on device" in capsys.readouterr().err
    ballast.with_name("more").unlink()
    (small_disk / "begun").mkdir()
    fill(small_disk)
    begun = folder_of("begun")
    with begun.locked(), pytest.raises(RunError, match="is open in"), begun.locked():
        pytest.fail("it was locked twice")
