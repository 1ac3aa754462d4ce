"""A byte that changed in a file of the path is found before anything is made of it."""

from pathlib import Path
from shutil import copytree

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.tasks.metrics import StepFiles, measure_step
from ratchet.tasks.recording.journal import JournalError, read_journal
from ratchet.tasks.storage.files import Damaged, verified
from ratchet.tasks.storage.run_folder import RunFolder
from ratchet.tasks.storage.tables import read_table, write_table
from ratchet.tasks.trajectories import assemble_trajectories
from tests.support.credited import read_datums, write_datums
from tests.support.runs.recorded_run import BATCH, CENTRED, record_run
from tests.tasks.test_journal import call, written


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return record_run(tmp_path_factory.mktemp("run"))


def damaged(path: Path, folder: Path, place: float, change: int) -> Path:
    """A copy of the file with one byte changed."""
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= change
    copy = folder / path.parent.name / path.name
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_bytes(data)
    return copy


places = st.floats(0, 1, exclude_max=True)
changes = st.integers(1, 255)


@given(st.sampled_from([f"spans/{BATCH}", "trajectories/00000", "datums/00000"]), places, changes)
def test_any_byte_changed_in_a_parquet_file_is_found(
    run: RunFolder, tmp_path_factory: pytest.TempPathFactory, name: str, place: float, change: int
) -> None:
    copy = damaged(run.path / f"{name}.parquet", tmp_path_factory.mktemp("flip"), place, change)
    with pytest.raises(Damaged, match="is damaged"):
        verified(copy)
    with pytest.raises(Damaged, match="Delete it, and resume the run"):
        read_table(copy)


@given(cut=places, place=places, change=changes)
def test_a_torn_journal_gives_what_was_whole_or_says_it_is_damaged(
    run: RunFolder, tmp_path_factory: pytest.TempPathFactory, cut: float, place: float, change: int
) -> None:
    journal, folder = run.journal(BATCH), tmp_path_factory.mktemp("flip")
    torn = folder / "torn" / "j.jsonl"
    torn.parent.mkdir()
    data = journal.read_bytes()
    torn.write_bytes(data[: 1 + int(cut * (len(data) - 1))])
    try:
        spans = read_journal(damaged(torn, folder / "flipped", place, change))
    except JournalError:
        return
    assert spans == read_journal(torn)


def test_the_last_byte_counts_as_any_other(run: RunFolder, tmp_path: Path) -> None:
    journal = run.journal(BATCH)
    data = journal.read_bytes()
    path = tmp_path / "j.jsonl"
    path.write_bytes(data[:-1] + b"\x0b")
    with pytest.raises(JournalError, match="line 6, is damaged"):
        read_journal(path)
    with pytest.raises(JournalError, match="line 6, is damaged"):
        written(path, call(7))
    path.write_bytes(data[:-1])
    assert len(read_journal(path)) == 5, "without its newline a line is torn"


@pytest.mark.parametrize(
    ("folder", "source"),
    [("spans", "journal"), ("trajectories", "spans"), ("datums", "trajectories")],
)
def test_no_stage_reads_a_damaged_file_and_the_remedy_is_named(
    run: RunFolder, tmp_path: Path, folder: str, source: str
) -> None:
    files = {path.parent.name: path for path in run.path.glob("*/*.parquet")}
    files[folder] = damaged(files[folder], tmp_path, 0.3, 0x10)
    stages = {
        "spans": lambda: assemble_trajectories.make(tmp_path / "t.parquet", [files["spans"]]),
        "trajectories": lambda: write_datums(
            tmp_path / "d.parquet", files["trajectories"], CENTRED
        ),
        "datums": lambda: read_datums(files["datums"], "ppo"),
    }
    said = rf"{folder}/.*is damaged.*Delete it, and resume.*made anew of {tmp_path / source}"
    with pytest.raises(Damaged, match=said):
        stages[folder]()
    with pytest.raises(Damaged, match=said):
        measure_step(StepFiles([files["spans"]], files["trajectories"], {}, files["datums"]))


def test_the_remedy_for_another_policy_s_file_names_its_own_sources(
    run: RunFolder, tmp_path: Path
) -> None:
    copy = RunFolder(copytree(run.path, tmp_path / "run"))
    home = copy.path / "policies" / "fox"
    for folder, source in (
        ("trajectories", copy.path / "spans"),
        ("datums", home / "trajectories"),
    ):
        path = damaged(copy.path / folder / "00000.parquet", home, 0.3, 0x10)
        with pytest.raises(Damaged, match=f"made anew of {source}"):
            verified(path)


def test_a_file_that_others_wrote_has_no_checksum_and_is_not_trained_on(tmp_path: Path) -> None:
    path = tmp_path / "datums" / "00000.parquet"
    path.parent.mkdir()
    pq.write_table(pa.table({"n": [1]}), path)
    with pytest.raises(Damaged, match="it has no checksum"):
        read_table(path)


def test_others_read_the_file_and_see_the_checksum(tmp_path: Path) -> None:
    path = write_table(pa.table({"n": [1, 2]}), tmp_path / "x.parquet")
    metadata = pq.ParquetFile(path).metadata.metadata
    assert len(metadata[b"ratchet.sha256"]) == 64
    assert set(metadata[b"ratchet.sha256"]) != {ord("0")}
    assert pq.read_table(path)["n"].to_pylist() == [1, 2]
