"""A durable task is done when its file is there, whoever asks."""

import errno
from pathlib import Path
from threading import Thread

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import TaskRunFilter, TaskRunFilterName

from ratchet.tasks.storage import files
from ratchet.tasks.storage.durability import durable
from ratchet.tasks.storage.files import appearing, write_text
from tests.support.processes import wait_until

pytestmark = pytest.mark.usefixtures("run_shown")
written: list[int] = []


@durable
def make_thing(path: Path, number: int) -> None:
    if number < 0:
        raise ValueError("no such thing")
    written.append(number)
    write_text(path, f"thing {number}")


@flow
def make_things(folder: str, numbers: list[int]) -> list[Path]:
    return [make_thing(Path(folder) / "things" / f"{n:03d}.txt", n) for n in numbers]


def recorded(*names: str) -> dict[str, str | None]:
    """Map task runs to their states, which Prefect records a little after they have ended."""
    named = TaskRunFilter(name=TaskRunFilterName(any_=list(names)))
    with get_client(sync_client=True) as client:
        return {run.name: run.state_name for run in client.read_task_runs(task_run_filter=named)}


def test_what_is_there_is_not_made_again(tmp_path: Path) -> None:
    written.clear()
    paths = make_things(str(tmp_path), [1, 2])
    assert paths == [tmp_path / "things" / f"00{n}.txt" for n in (1, 2)]

    make_things(str(tmp_path), [1, 2, 3])
    assert written == [1, 2, 3]


def test_a_task_whose_file_is_there_returns_its_path_and_is_cached(tmp_path: Path) -> None:
    (tmp_path / "things").mkdir()
    (tmp_path / "things" / "007.txt").write_text("made before")
    assert make_things(str(tmp_path), [7]) == [tmp_path / "things" / "007.txt"]
    cached = {"things/007": "Cached"}
    wait_until("the record of it", lambda: recorded("things/007") == cached)
    assert recorded("things/007") == cached


def test_a_task_run_is_named_after_its_file_and_the_policy_that_has_it(tmp_path: Path) -> None:
    make_things(str(tmp_path), [1])
    make_things(str(tmp_path / "policies" / "fox"), [1])
    names = {"things/001", "policies/fox/things/001"}
    wait_until("the record of them", lambda: recorded(*names).keys() == names)
    assert recorded(*names).keys() == names


def test_a_task_that_fails_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such thing"):
        make_things(str(tmp_path), [-1])
    assert list(tmp_path.rglob("*.txt")) == []


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.txt"
    with pytest.raises(UnicodeEncodeError), appearing(path) as aside:
        aside.write_text("half, then a lone surrogate: \ud800")
    assert list(tmp_path.rglob("*.*")) == []

    write_text(path, "whole")
    assert path.read_text() == "whole"
    assert [child.name for child in path.parent.iterdir()] == ["file.txt"]


def test_with_a_full_disk_writing_waits_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files, "SPACE_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(files, "RESERVE_BYTES", 2**60)
    path = tmp_path / "file.txt"
    writer = Thread(target=write_text, args=(path, "whole"))
    writer.start()
    wait_until("the warning", lambda: f"the disk of {tmp_path} is full" in caplog.text)
    assert writer.is_alive()
    assert not path.exists()

    monkeypatch.setattr(files, "RESERVE_BYTES", 0)
    writer.join()
    assert path.read_text() == "whole"


def test_a_task_that_met_a_full_disk_is_retried(tmp_path: Path) -> None:
    failures = [OSError(errno.ENOSPC, "No space left on device")]

    def write_once(path: Path) -> None:
        if failures:
            raise failures.pop()
        write_text(path, "made")

    made = durable(write_once)(tmp_path / "once.txt")
    assert made.read_text() == "made"
    assert failures == []
