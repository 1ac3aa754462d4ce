"""Logs are read once and then followed: a look finds what reading the whole file anew finds."""

import os
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.tasks.checkpoints import Checkpoint, Ledger
from ratchet.tasks.storage.files import Damaged
from ratchet.tasks.storage.logs import FollowedLog, append_row, follow, line_of, read_log

Rows = list[dict[str, Any]]
Found = Rows | str


def found(read: Callable[[], Rows]) -> Found:
    """Return what is read, or the error of a damaged log."""
    try:
        return read()
    except Damaged as error:
        return str(error)


class Writer:
    """Whoever writes a log, whatever becomes of it; no two rows are equal."""

    def __init__(self, path: Path) -> None:
        self.path, self.row, self.changes = path, 0, 0

    def act(self, action: str, size: int) -> None:
        """Do something to the log; `size` says how much of it that concerns."""
        data = self.path.read_bytes() if self.path.exists() else b""
        match action:
            case "append" if self._is_whole():
                self.row += 1
                append_row(self.path, {"row": self.row, "text": "x" * (size % 7)})
            case "tear":
                self._write(data[: max(0, len(data) - size)])
            case "write half a line":
                self._write(data + line_of({"row": -1})[: size % 20])
            case "cut back":
                self._write(b"".join(data.splitlines(keepends=True)[: size % 4]))
            case "put in place":
                aside = self.path.with_suffix(".aside")
                aside.write_bytes(b"".join(data.splitlines(keepends=True)[: size % 4]))
                aside.replace(self.path)
            case "damage" if data:
                place = size % len(data)
                self._write(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
            case "delete":
                self.path.unlink(missing_ok=True)
            case _:
                pass

    def _is_whole(self) -> bool:
        return isinstance(found(lambda: read_log(self.path)), list)

    def _write(self, data: bytes) -> None:
        """Write in place, later than all that was written before by the clock of the disk."""
        self.path.write_bytes(data)
        self.changes += 1
        later = 2 * 10**18 + self.changes * 10**9
        os.utime(self.path, ns=(later, later))


ACTIONS = st.sampled_from(
    ["append"] * 4
    + ["tear", "write half a line", "cut back", "put in place", "damage", "delete", "look"]
)


@given(actions=st.lists(st.tuples(ACTIONS, st.integers(0, 400), st.booleans()), max_size=25))
def test_following_finds_what_reading_anew_finds_whatever_becomes_of_a_log(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, int, bool]]
) -> None:
    path = tmp_path_factory.mktemp("logs") / "metrics.jsonl"
    log, writer = FollowedLog(path, list[dict[str, Any]]), Writer(path)
    for action, size, looks in actions:
        damaged = action == "damage"  # if a file has grown, a look sees only damage to its end
        if damaged:
            found(lambda: log.ask(Rows))
        writer.act(action, size)
        if looks or damaged:
            assert found(lambda: log.ask(Rows)) == found(lambda: read_log(path))
    assert found(lambda: log.ask(Rows)) == found(lambda: read_log(path))


@given(torn=st.integers(0, 30), looks=st.booleans())
def test_a_row_that_is_appended_takes_the_place_of_a_torn_line(
    tmp_path_factory: pytest.TempPathFactory, torn: int, looks: bool
) -> None:
    path = tmp_path_factory.mktemp("logs") / "metrics.jsonl"
    log = FollowedLog(path, list[dict[str, Any]])
    log.append({"step": 0})
    with path.open("ab") as file:
        file.write(line_of({"step": 1})[:-1][:torn])
    if looks:
        log.ask(Rows)
    log.append({"step": 2})
    assert log.ask(Rows) == read_log(path) == [{"step": 0}, {"step": 2}]
    assert path.read_bytes() == line_of({"step": 0}) + line_of({"step": 2})


def test_a_log_is_not_read_again_from_its_beginning(tmp_path: Path) -> None:
    path, read = tmp_path / "metrics.jsonl", list[int]()

    class Counting(list[dict[str, Any]]):
        def append(self, row: dict[str, Any]) -> None:
            read.append(row["step"])
            super().append(row)

    log = FollowedLog(path, Counting)
    for step in range(5):
        log.append({"step": step})
        assert len(log.ask(Rows)) == step + 1
    append_row(path, {"step": 5})
    assert log.ask(len) == 6
    assert read == [*range(6)]


def test_a_damaged_log_is_refused_at_every_look_until_it_is_mended(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = FollowedLog(path, list[dict[str, Any]])
    log.append({"step": 0})
    whole = path.read_bytes()
    log.ask(Rows)
    with path.open("ab") as file:
        file.write(line_of({"step": 1}).replace(b"1", b"2", 1))
    for look in (lambda: log.ask(Rows), lambda: log.ask(Rows), lambda: log.append({"step": 2})):
        with pytest.raises(Damaged, match=r"line 2 of .* is damaged"):
            look()
    path.write_bytes(whole)
    log.append({"step": 1})
    assert log.ask(Rows) == [{"step": 0}, {"step": 1}]


def test_threads_that_append_lose_no_row(tmp_path: Path) -> None:
    log = follow(tmp_path / "log.jsonl", list[dict[str, Any]])

    def write(first: int) -> None:
        for row in range(first, first + 20):
            log.append({"row": row})

    threads = [Thread(target=write, args=(first,)) for first in (0, 100, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = [row["row"] for row in read_log(log.path)]
    assert sorted(rows) == [*range(20), *range(100, 120), *range(200, 220)]
    assert [row["row"] for row in log.ask(Rows)] == rows


def test_a_ledger_that_was_cut_back_by_hand_is_known_as_it_is(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "checkpoints.jsonl")
    for step in range(4):
        ledger.begin(step)
        ledger.add(Checkpoint(step, f"tinker://r/s/{step}"))
    assert (ledger.last_step(), ledger.in_doubt()) == (3, None)
    lines = ledger.path.read_bytes().splitlines(keepends=True)
    ledger.path.write_bytes(b"".join(lines[:5]))
    assert (ledger.last_step(), ledger.in_doubt(), ledger.find(2)) == (1, 2, None)
    ledger.add(Checkpoint(2, "tinker://again/s/2"))
    assert ledger.at(2).sampler == "tinker://again/s/2"
