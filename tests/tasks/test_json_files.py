"""JSON files of a run: every flipped byte and every cut tail is found, and named with a remedy."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.tasks.storage.files import Damaged, read_json, read_rows, write_json, write_rows
from ratchet.tasks.storage.logs import append_row, read_log

Read = Callable[[Path], object]
VALUE = {"recipe": {"agent": "ä\u2028", "sha256": "no"}, "checksum": "0" * 64, "x": 0.1}
ROWS = [{"step": 0, "text": "a\u2028b\nc\x85"}, {"step": 1, "reward/mean": 0.1 + 0.2}]
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=10,
)
OBJECTS = st.dictionaries(st.sampled_from("abcd"), JSON)


def write_log(path: Path) -> None:
    for row in ROWS:
        append_row(path, row)


@given(value=OBJECTS, rows=st.lists(OBJECTS, min_size=1))
def test_what_was_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory,
    value: dict[str, object],
    rows: list[dict[str, object]],
) -> None:
    folder = tmp_path_factory.mktemp("files")
    assert read_json(write_json(folder / "one.json", value)) == value
    assert read_rows(write_rows(folder / "rows.jsonl", rows)) == rows
    for row in rows:
        append_row(folder / "log.jsonl", row)
    assert read_log(folder / "log.jsonl") == rows


@pytest.fixture(params=["object", "rows", "log"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Read]:
    """A file, and the function that reads it."""
    path = tmp_path / "metrics.jsonl"
    match request.param:
        case "object":
            return write_json(path, VALUE), read_json
        case "rows":
            return write_rows(path, ROWS), read_rows
        case _:
            write_log(path)
            return path, read_log


def test_every_flipped_bit_is_found(file: tuple[Path, Read]) -> None:
    path, read = file
    data, silent = path.read_bytes(), []
    for place in range(len(data)):
        for bit in range(8):
            path.write_bytes(data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :])
            try:
                read(path)
            except Damaged:
                continue
            silent.append((place, bit))
    assert silent == []


def test_every_cut_tail_of_a_whole_file_is_found(tmp_path: Path) -> None:
    for path, read in (
        (write_json(tmp_path / "one.json", VALUE), read_json),
        (write_rows(tmp_path / "rows.jsonl", ROWS), read_rows),
    ):
        data = path.read_bytes()
        for length in range(len(data)):
            path.write_bytes(data[:length])
            with pytest.raises(Damaged):
                read(path)


def test_a_log_that_was_cut_has_its_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write_log(path)
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        assert read_log(path) == ROWS[: data[:length].count(b"\n")]


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("manifest.json", "Restore it from a copy"),
        ("shards/train-00000.jsonl", "Delete it, and resume the run: it is made anew"),
        ("updates/00000.json", "Delete it, and resume the run: it is made anew"),
        ("evaluations/00000.json", "Delete it, and resume the run: it is made anew"),
    ],
)
def test_damage_is_named_with_its_remedy(tmp_path: Path, name: str, remedy: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(Damaged, match=f"{name} is damaged: it has no checksum. {remedy}"):
        read_json(path)
