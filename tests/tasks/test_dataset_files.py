"""A file of rows is read by value, whatever it is called, or refused by name, row and column."""

import gzip
import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from decimal import Context, Decimal
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unicodedata import normalize

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.adapters.project.hub import locate_dataset
from ratchet.tasks.examples.reading import (
    ROW_READERS,
    DatasetError,
    Source,
    read_examples,
    read_rows,
)
from ratchet.tasks.examples.rows import LONGEST_MESSAGE

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NUMBERS = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
SCHEMA = pa.schema(
    [
        ("Text", pa.string()),
        ("text", pa.list_(pa.struct([("role", pa.string()), ("n", pa.float64())]))),
        ("n", pa.int64()),
        ("yes", pa.bool_()),
    ]
)
ROWS = st.lists(st.dictionaries(TEXTS, VALUES, min_size=1, max_size=4), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Make the path of a new file, of a kind, in a folder of its own."""
    folder, numbers = tmp_path_factory.mktemp("files"), count()

    def name(kind: str) -> Path:
        return folder / f"{next(numbers)}{kind}"

    return name


def written(path: Path, data: str | bytes) -> Path:
    data = data.encode() if isinstance(data, str) else data
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(DatasetError) as refused:
        read_rows(path)
    said = str(refused.value)
    assert path.name in said or "…" in said
    assert len(said) <= LONGEST_MESSAGE
    return said


def is_read_or_refused(path: Path) -> bool:
    try:
        return all(isinstance(row, dict) for row in read_rows(path))
    except DatasetError as error:
        return len(str(error)) <= LONGEST_MESSAGE


@given(ROWS)
def test_rows_of_json_come_back_as_they_were(
    place: Callable[[str], Path], rows: list[dict[str, Any]]
) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    plain = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    assert read_rows(written(place(".jsonl"), lines)) == rows
    assert read_rows(written(place(".jsonl"), b"\xef\xbb\xbf" + plain.encode())) == rows
    assert read_rows(written(place(".jsonl.gz"), lines)) == rows
    assert read_rows(written(place(".json"), json.dumps(rows, indent=1))) == rows
    assert read_rows(written(place(".json"), lines)) == rows


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "Text": TEXTS | st.none(),
                "text": st.lists(st.fixed_dictionaries({"role": TEXTS, "n": NUMBERS.map(float)})),
                "n": st.integers(-(2**63), 2**63 - 1),
                "yes": st.booleans() | st.none(),
            }
        ),
        min_size=1,
        max_size=5,
    )
)
def test_rows_of_parquet_come_back_as_they_were(
    place: Callable[[str], Path], rows: list[dict[str, Any]]
) -> None:
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    path, other = place(".parquet"), place(".parquet")
    pq.write_table(table, path)
    delta = {"Text": "DELTA_BYTE_ARRAY"}
    pq.write_table(table, other, use_dictionary=False, column_encoding=delta)
    assert read_rows(path) == read_rows(other) == rows


@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=1))
def test_cells_of_a_csv_come_back_as_they_were(
    place: Callable[[str], Path], rows: list[tuple[str, str]]
) -> None:
    def quoted(cell: str) -> str:
        return '"' + cell.replace('"', '""') + '"'

    lines = "\n".join(",".join(map(quoted, row)) for row in [("# a", "2"), *rows])
    found = read_rows(written(place(".csv"), "\ufeff" + lines))
    assert found == [{"# a": one or None, "2": other or None} for one, other in rows]


@given(st.binary(max_size=80) | ROWS.map(lambda rows: json.dumps(rows).encode()), st.data())
def test_any_bytes_are_rows_or_a_refusal(
    place: Callable[[str], Path], data: bytes, drawn: st.DataObject
) -> None:
    cut = data[: drawn.draw(st.integers(0, len(data)))]
    for kind in ROW_READERS:
        path = place(kind)
        path.write_bytes(cut)
        assert is_read_or_refused(path)


@given(st.data())
def test_a_parquet_with_changed_bytes_is_rows_or_a_refusal(
    place: Callable[[str], Path], drawn: st.DataObject
) -> None:
    path = place(".parquet")
    pq.write_table(pa.table({"a": ["x", "y"], "b": [[1.0], []]}), path)
    data = bytearray(path.read_bytes())
    for _ in range(drawn.draw(st.integers(1, 4))):
        data[drawn.draw(st.integers(0, len(data) - 1))] = drawn.draw(st.integers(0, 255))
    path.write_bytes(data)
    assert is_read_or_refused(path)


@pytest.mark.parametrize("name", ["seed=3", "exp[1]", "~", "s3:", "né\n", "{a,b}", "a\\[b]"])
def test_a_path_is_a_path(tmp_path: Path, name: str) -> None:
    for here in (tmp_path / name, tmp_path / "exp1"):
        here.mkdir()
        row = {"seed": str(here), "split": "train"}
        written(here / "d.csv", f'seed,split\n"{here}",train\n')
        pq.write_table(pa.Table.from_pylist([row]), here / "d.parquet")
    for kind in ("csv", "parquet"):
        [one] = read_examples(tmp_path / name / f"d.{kind}", "train")
        assert one["example"] == {"seed": str(tmp_path / name), "split": "train"}


def test_a_number_that_is_none_is_a_null_wherever_it_stands(tmp_path: Path) -> None:
    nan = float("nan")
    rows = [{"a": nan, "b": [{"c": nan}, {"c": 1.5}]}]
    lines = written(tmp_path / "a.jsonl", json.dumps(rows[0]))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    pq.write_table(pa.table({"a": pa.array([nan, 0.1], pa.float32())}), tmp_path / "b.parquet")
    for path in (lines, tmp_path / "a.parquet"):
        assert read_rows(path) == [{"a": None, "b": [{"c": None}, {"c": 1.5}]}]
    assert read_rows(tmp_path / "b.parquet") == [{"a": None}, {"a": 0.1}]
    assert read_rows(written(tmp_path / "a.csv", "a,b\n,NaN\n")) == [{"a": None, "b": "NaN"}]


@pytest.mark.parametrize("value", ["Infinity", "-Infinity", "1e999", "-1E+0400", "9" * 400 + ".0"])
def test_infinity_is_refused_by_row_and_column(tmp_path: Path, value: str) -> None:
    path = written(
        tmp_path / "a.jsonl", f'{{"a": "Infinity"}}\n{{"a": 1, "b": [{{"c": {value}}}]}}'
    )
    assert "row 1 of" in refusal(path)
    assert "has an infinite number" in refusal(path)


def test_infinity_of_parquet_is_refused_by_row_and_column(tmp_path: Path) -> None:
    rows = [{"a": 1.0, "b": {"c": 1.0}}] * 1500 + [{"a": 1.0, "b": {"c": float("inf")}}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert "row 1500 of" in (said := refusal(tmp_path / "a.parquet"))
    assert "has an infinite number" in said


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.jsonl", '{"a": 1}\n{"a":', "row 1 of .* is no JSON .Expecting value"),
        ("a.jsonl", '{"a": 1} {"a": 2}', "row 0 of .* is no JSON .Extra data"),
        ("a.jsonl", '{"a": 1, "a": 2}', "row 0 of .* gives 'a' twice"),
        ("a.jsonl", '{"a": "\\ud83d"}', "row 0 of .* half of a surrogate pair"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}', "row 1 of .* what is no UTF-8"),
        ("a.jsonl", '{"a": 1}'.encode("utf-16"), "row 0 of .* is no JSON"),
        ("a.jsonl", f'{{"a": {"9" * 6000}}}', "row 0 of .* is no JSON"),
        ("a.jsonl", "[" * 200_000, "row 0 of .* is no JSON .maximum recursion"),
        ("a.json", '[{"a": 1} {"a": 2}]', "is no JSON .*delimiter: line 1 column 11"),
        ("a.json", '[{"a": 1}] {', "is no JSON .Extra data"),
        (
            "a.jsonl.gz",
            gzip.compress(b"{}\n" * 9, mtime=0)[:-9],
            "is no JSON|is no whole gzip file",
        ),
        ("a.csv", "a,a\n1,2\n", "has the column 'a' twice"),
        ("a.csv", "a,b\n1,2\n3\n", "row 1 of .* has 1 cells, and the header 2"),
        ("a.csv", 'a,b\n"x"y,2\n', "row 0 of .* is no CSV"),
        ("a.csv", 'a,b\n"x,2\n', "row 0 of .* is no CSV"),
        ("a.csv", b"a,b\n1,2\n\xe9,2\n", "row 1 of .* what is no UTF-8"),
        ("a.parquet", b"PAR1 and more", "cannot be read as Parquet"),
    ],
)
def test_what_cannot_be_read_is_refused_in_a_sentence(
    tmp_path: Path, name: str, data: str | bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(data.encode() if isinstance(data, str) else data)
    with pytest.raises(DatasetError, match=said):
        raise DatasetError(refusal(tmp_path / name))


def test_a_csv_s_first_line_is_its_header_whatever_it_says(tmp_path: Path) -> None:
    numbers = written(tmp_path / "a.csv", "1,2\n3,4\n")
    assert read_rows(numbers) == [{"1": "3", "2": "4"}]
    assert "row 0 of" in refusal(written(tmp_path / "b.csv", "made by hand\na,b\n1,2\n"))
    index = written(tmp_path / "c.csv", ",a\n0,x\n")
    assert read_rows(index) == [{"column0": "0", "a": "x"}]


@pytest.mark.parametrize("kind", ["folder", "link", "closed"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "d.jsonl"
    match kind:
        case "folder":
            path.mkdir()
        case "link":
            path.symlink_to(tmp_path / "gone.jsonl")
        case "closed":
            written(path, "{}").chmod(0)
    if kind == "closed" and os.access(path, os.R_OK):
        pytest.skip("nothing is closed to this user")
    with pytest.raises(DatasetError) as refused:
        Source(path, "train", ()).examples()
    assert len(str(refused.value)) <= LONGEST_MESSAGE


def test_a_file_larger_than_half_of_the_free_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = written(tmp_path / "a.jsonl", '{"a": 1}\n' * 1000)
    pq.write_table(pa.table({"a": ["b" * 1000] * 2}), tmp_path / "a.parquet", use_dictionary=False)
    read_rows(lines)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=3000))
    for path in (lines, tmp_path / "a.parquet"):
        assert "GiB, which is more than half of the free memory; split" in refusal(path)


def column(path: Path, values: pa.Array) -> list[dict[str, Any]]:
    pq.write_table(pa.table({"a": values, "split": ["train"] * len(values)}), path)
    return read_rows(path)


def test_rows_of_other_types_are_what_json_says(tmp_path: Path) -> None:
    table = pa.table(
        {
            "when": pa.array([0], pa.timestamp("us")),
            "map": pa.array([[("k", Decimal("1.50"))]], pa.map_(pa.string(), pa.decimal128(9, 2))),
            "bytes": ["né".encode()],
            "kind": pa.array(["x"]).dictionary_encode(),
            "id": pa.array([b"0123456789abcdef"], pa.uuid()),
            "pair": pa.array([(0.1, 0.1)], pa.struct([("f", pa.float32()), ("d", pa.float64())])),
            "half": pa.array([0.1], pa.float16()),
            "whole": pa.array([Decimal(10**37)], pa.decimal128(38, 0)),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    [row] = read_rows(tmp_path / "a.parquet")
    assert row == {
        "when": "1970-01-01 00:00:00",
        "map": {"k": "1.50"},
        "bytes": "né",
        "kind": "x",
        "id": "30313233-3435-3637-3839-616263646566",
        "pair": {"f": 0.1, "d": 0.1},
        "half": 0.1,
        "whole": 10**37,
    }


@given(st.lists(st.integers(1 - 10**38, 10**38 - 1) | st.none(), max_size=4), st.integers(1, 38))
def test_a_decimal_of_parquet_keeps_its_digits(
    place: Callable[[str], Path], digits: list[int | None], scale: int
) -> None:
    kind = pa.decimal128(38, scale)
    values = [one and Decimal(one).scaleb(-scale, Context(prec=38)) for one in digits]
    found = [row["a"] for row in column(place(".parquet"), pa.array(values, kind))]
    assert [one and int(one.replace(".", "")) for one in found] == [n and int(n) for n in digits]
    assert all(len(one.partition(".")[2]) == scale for one in found if one)


UNITS = {"s": 10**9, "ms": 10**6, "us": 1000, "ns": 1}
FIRST, LAST = -62_135_596_800, 253_402_300_799
"""Seconds of the first day of the year 1, and of the last of the year 9999."""


@given(st.data(), st.sampled_from([*UNITS]), st.sampled_from([None, "UTC", "+05:30"]))
def test_a_time_of_parquet_keeps_its_digits(
    place: Callable[[str], Path], drawn: st.DataObject, unit: str, zone: str | None
) -> None:
    first, last = (max(-(2**63), min(2**63 - 1, n * 10**9 // UNITS[unit])) for n in (FIRST, LAST))
    borders = (
        st.sampled_from([first, -1, 0, 1, 999, 1000, 10**9 - 1, last]) if not zone else st.just(0)
    )
    inner = st.integers(first // 2, last // 2)
    values = drawn.draw(st.lists(borders | inner, min_size=1, max_size=5))
    written = pa.array(values, pa.int64()).cast(pa.timestamp(unit, zone))
    for value, row in zip(values, column(place(".parquet"), written), strict=True):
        text = row["a"]
        fraction = re.search(r"\.(\d+)", text)
        whole = datetime.fromisoformat(re.sub(r"\.\d+", "", text))
        seconds = whole.replace(tzinfo=whole.tzinfo or UTC) - datetime(1970, 1, 1, tzinfo=UTC)
        nano = int(fraction[1].ljust(9, "0")) if fraction else 0
        assert seconds // timedelta(seconds=1) * 10**9 + nano == value * UNITS[unit]


@given(st.lists(st.binary(max_size=9) | TEXTS.map(str.encode), min_size=1))
def test_bytes_of_parquet_are_text_or_refused_where_they_are_read(
    place: Callable[[str], Path], values: list[bytes]
) -> None:
    path = place(".parquet")
    for number, row in enumerate(column(path, pa.array(values, pa.binary()))):
        with suppress(UnicodeDecodeError):
            text = values[number].decode()
            assert row.get("a") == text if "\0" not in text else "a" not in row
        assert row["split"] == "train"
        if "a" not in row:
            with pytest.raises(DatasetError, match="its column 'a' what JSON has not"):
                row.get("a")
            with pytest.raises(DatasetError, match=r"row \d+ of .* has in its column 'a' what"):
                read_examples(path, "train", ["a"])
    assert len(read_examples(path, "train", ["split"])) == len(values)


@pytest.mark.parametrize(
    ("values", "cause"),
    [
        (pa.array([0, 3 * 10**11], pa.timestamp("s")), "out of range"),
        (pa.array([0, 10**7], pa.date32()), "out of range"),
        (pa.array([None, 0], pa.timestamp("us", "Mars/X")), "Mars/X"),
        (pa.array([b"", b"\x01\0\0\0"]), "type binary"),
        (pa.array([None, b"x"], pa.opaque(pa.binary(), "t", "v")), "type extension<arrow.opaque"),
        (pa.array([[], [("k", 1), ("k", 2)]], pa.map_(pa.string(), pa.int64())), "'k' twice"),
    ],
)
def test_a_type_that_json_has_not_is_refused_by_row_column_and_cause_if_it_is_read(
    tmp_path: Path, values: pa.Array, cause: str
) -> None:
    path = tmp_path / "a.parquet"
    column(path, values)
    assert len(Source(path, "train", ("split",)).examples()) == 2
    with pytest.raises(DatasetError, match=f"row 1 of .* in its column 'a' .*{cause}"):
        Source(path, "train", ("a",)).examples()
    with pytest.raises(DatasetError, match=f"in its column 'a' .*{cause}"):
        Source(path, "train", (), renamed=(("b", "a"),)).examples()


def test_a_path_in_the_home_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for folder in ("home", "~"):
        (tmp_path / folder).mkdir()
        written(tmp_path / folder / f"{folder}.jsonl", '{"a": 1}')
    assert locate_dataset("~/home.jsonl") == tmp_path / "home" / "home.jsonl"
    assert locate_dataset("~/~.jsonl") == tmp_path / "~" / "~.jsonl"
    assert locate_dataset("~nobody/x.jsonl") == tmp_path / "~nobody" / "x.jsonl"


@given(st.text(st.characters(categories=["Ll", "Mn"]), min_size=1, max_size=6))
def test_a_name_in_another_form_of_unicode_is_found(
    place: Callable[[str], Path], name: str
) -> None:
    folder = place("")
    composed, split = (folder / normalize(form, name) / "d.jsonl" for form in ("NFC", "NFD"))
    for one, other in ((composed, split), (split, composed)):
        one.parent.mkdir(parents=True, exist_ok=True)
        written(one, json.dumps({"a": str(one)}))
        if one is composed:
            assert locate_dataset(str(other)).read_text() == one.read_text()
    assert {locate_dataset(str(one)) for one in (composed, split)} == {composed, split}


def test_a_column_in_another_form_of_unicode_is_told_apart(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", json.dumps({"e\u0301": 1, "split": "train"}))
    with pytest.raises(DatasetError, match=r"'e\\u0301' looks like '\\xe9', and is another name"):
        read_examples(path, "train", ["\xe9"])


def test_a_refusal_is_short_however_long_its_path_and_columns_are(tmp_path: Path) -> None:
    folder = tmp_path / "/".join(["f" * 100] * 5)
    folder.mkdir(parents=True)
    columns = {f"{number}-{'c' * 90}": 1 for number in range(50)}
    path = written(folder / "d.jsonl", json.dumps({**columns, "split": "train"}))
    with pytest.raises(DatasetError, match=r"row 0 of .* and 45 more") as refused:
        read_examples(path, "train", ["x"])
    assert len(str(refused.value)) <= LONGEST_MESSAGE
