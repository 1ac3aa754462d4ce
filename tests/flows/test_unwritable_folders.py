"""A folder that nothing can be written in is refused by a sentence, with nothing left of it."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.flows.test_wrong_inputs import make_run, refused, small_project

TEXT = (Path(__file__).parents[1] / "support" / "trinity.yaml").read_text()
TRINITY = "import trinity trinity.yaml --set steps=2 --set dataset.path=fine.csv"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a sound recipe and a run of it."""
    small_project(tmp_path, monkeypatch, {"trinity.yaml": TEXT})
    make_run("begun")
    return tmp_path


def mount(place: Path, *options: str) -> None:
    try:
        command = ["mount", *options, str(place)]
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command here")
    if mounted.returncode:
        pytest.skip(f"nothing can be mounted here: {mounted.stderr.strip()}")


@pytest.fixture
def read_only(project: Path) -> Iterator[Path]:
    """A file system that is read-only, with a run."""
    place = project / "read-only"
    shutil.copytree("runs", place)
    mount(place, "--bind", "-o", "ro", str(place))
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.fixture
def full(project: Path) -> Iterator[Path]:
    """A file system with less space than any file needs."""
    place = project / "full"
    place.mkdir()
    mount(place, "-t", "tmpfs", "-o", "size=64k", "tmpfs")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.usefixtures("read_only")
@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("init read-only/mine", "another folder"),
        ("sql select --out read-only/rows.csv", "another file as --out"),
        (f"{TRINITY} --out read-only/fine.yaml", "another file as --out"),
    ],
)
def test_what_is_to_be_written_on_a_read_only_disk_is_refused(
    line: str, instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(line.split(), capsys)
    assert "nothing can be written at read-only" in said
    assert "Read-only file system" in said
    assert f"give {instead}" in said


@pytest.mark.parametrize(
    "line",
    [
        "train fine.yaml",
        "train fine.yaml --run begun --if-exists delete",
        "resume begun",
        "fork begun --at 0",
        "evaluate fine.yaml --run begun",
        "dryrun fine.yaml",
        "report begun",
    ],
)
def test_runs_on_a_read_only_disk_are_refused(
    line: str, read_only: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RATCHET_RUNS", str(read_only))
    said = refused(line.split(), capsys)
    assert f"nothing can be written at {read_only}/" in said
    assert "Read-only file system" in said


UNWRITABLE = {
    "a file": ("fine.csv", "Not a directory"),
    "a missing disk": ("unmounted", "No such file or directory"),
    "a long name": ("x" * 256, "File name too long"),
}


@pytest.mark.parametrize(("folder", "why"), UNWRITABLE.values(), ids=[*UNWRITABLE])
def test_a_folder_that_cannot_be_made_is_refused_with_the_reason(
    folder: str,
    why: str,
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (project / "unmounted").symlink_to(project / "gone")
    for line in (f"init {folder}", f"report begun --out {folder}/r.html"):
        said = refused(line.split(), capsys)
        assert f"nothing can be written at {folder}" in said, line
        assert why in said, line
    monkeypatch.setenv("RATCHET_RUNS", folder)
    for line in ("train fine.yaml", "dryrun fine.yaml"):
        said = refused(line.split(), capsys)
        assert f"nothing can be written at {folder}" in said, line
        assert "give another folder of runs as RATCHET_RUNS" in said, line


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("line", ["init full", "report begun --out full/r.html"])
def test_a_command_does_not_wait_for_space_on_a_full_disk(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(line.split(), capsys)
    assert "/full is full (0 MiB are free, and 16 are needed); make space, or give another" in said
