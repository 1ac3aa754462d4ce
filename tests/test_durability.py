"""A durable task is done when its file is there, whoever asks."""

from pathlib import Path

import pytest
from prefect import flow

from tasks.durability import durable
from tasks.files import appearing, write_text

pytestmark = pytest.mark.usefixtures("prefect_server")
written: list[int] = []


@durable("things/{number:03d}.txt", "thing {number}")
def make_thing(path: Path, number: int) -> None:
    if number < 0:
        raise ValueError("no such thing")
    written.append(number)
    write_text(path, f"thing {number}")


@flow
def make_things(folder: str, numbers: list[int]) -> list[Path]:
    return [make_thing(Path(folder), number) for number in numbers]


def test_what_is_there_is_not_made_again(tmp_path: Path) -> None:
    written.clear()
    paths = make_things(str(tmp_path), [1, 2])
    assert paths == [tmp_path / "things" / f"00{n}.txt" for n in (1, 2)]

    make_things(str(tmp_path), [1, 2, 3])
    assert written == [1, 2, 3]


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
