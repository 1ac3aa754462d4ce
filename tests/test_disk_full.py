"""A full disk stops the writing and not the run: when there is space again, everything is there."""

import asyncio
import errno
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from adapters.calls import Completion, Sampling
from adapters.door.door import Door
from tasks import journal as journals
from tasks.journal import Journal, JournalError, read_journal
from tasks.spans import call_span
from tasks.storage.tables import read
from tests.test_door import ASK, CHAT, TOKEN, Opened, Scripted
from tests.test_journal import call
from tests.test_recorded import Collect, collect, service

__all__ = ["collect", "service"]

SAID = "the disk of {} is full; writing goes on when there is space"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command here")
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


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


def free_later(ballast: Path, seconds: float = 0.3) -> threading.Thread:
    def free() -> None:
        time.sleep(seconds)
        ballast.unlink()

    thread = threading.Thread(target=free)
    thread.start()
    return thread


def test_appends_wait_while_the_disk_is_full_and_none_is_lost(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = small_disk / "j.jsonl"

    async def append_all(journal: Journal) -> None:
        await asyncio.gather(*(journal.append(call(number)) for number in range(600, 604)))

    with Journal(path) as journal:
        journal.append_now(call(0))
        freeing = free_later(fill(small_disk))
        started = time.monotonic()
        asyncio.run(append_all(journal))
        waited = time.monotonic() - started
        journal.append_now(call(9))
    freeing.join()
    assert waited > 0.25
    assert [span["call"] for span in read_journal(path)] == [0, *range(600, 604), 9]
    assert caplog.messages == [SAID.format(path)], "it is said once"


def test_a_line_that_only_partly_fitted_is_cut_before_it_is_written_again(
    small_disk: Path,
) -> None:
    path = small_disk / "j.jsonl"
    with Journal(path) as journal:
        journal.append_now(call(0))
        whole = path.stat().st_size
        ballast = fill(small_disk)
        added = threading.Thread(target=journal.append_now, args=(long_call(),))
        added.start()
        time.sleep(0.2)
        assert path.stat().st_size == whole, "what was written of it is not left there"
        ballast.unlink()
        added.join(10)
    assert [span["call"] for span in read_journal(path)] == [0, 2000]


def long_call() -> dict:
    """A span of some pages, so that a part of it fits where the whole does not."""
    return call(2000)


def test_a_journal_that_is_closed_while_the_disk_is_full_gives_up(small_disk: Path) -> None:
    journal = Journal(small_disk / "j.jsonl")
    ballast, errors = fill(small_disk), []

    def add() -> None:
        try:
            journal.append_now(long_call())
        except JournalError as error:
            errors.append(str(error))

    added = threading.Thread(target=add)
    added.start()
    time.sleep(0.1)
    journal.close()
    added.join(10)
    ballast.unlink()
    assert len(errors) == 1
    assert "No space left on device" in errors[0]
    assert read_journal(journal.path) == []


def test_an_answer_waits_at_the_door_until_it_is_on_disk(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, sampler = small_disk / "j.jsonl", Scripted()
    with Journal(path) as journal:

        async def record(completion: Completion) -> None:
            await journal.append(call_span(completion))

        with (
            Door(CHAT, TOKEN, record, Sampling(9, 1.0, 1.0, -1), run_seed=7) as door,
            Opened(door, sampler, []).client as client,
        ):
            ask = client.chat.completions.create
            ask(model="m", messages=ASK)
            freeing = free_later(fill(small_disk))
            started = time.monotonic()
            answer = ask(model="m", messages=ASK, user="x" * 5000)  # recorded, so a page and more
            waited = time.monotonic() - started
            freeing.join()
    first, second = read_journal(path)
    assert second["gen_ai_response_id"] == answer.id != first["gen_ai_response_id"]
    assert waited > 0.25
    assert SAID.format(path) in caplog.messages


def test_the_time_of_a_rollout_does_not_run_while_the_disk_is_full(
    small_disk: Path, tmp_path: Path, collect: Collect
) -> None:
    freeing = free_later(fill(small_disk), seconds=2.5)
    rows = read(collect(small_disk, sealed=tmp_path, timeout_seconds=1.5)).to_pylist()
    freeing.join()
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
        journal.append_now(call(0))
        journal.append_now(call(1))
    assert [span["call"] for span in read_journal(path)] == [0, 1]
