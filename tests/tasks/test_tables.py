"""A query and its parameters → Arrow → Parquet."""

import json
import re
import warnings
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.tasks.storage.files import read_footer
from ratchet.tasks.storage.tables import arrays, select, write_parts, write_table


def test_a_query_is_answered_in_its_order_with_its_parameters(tmp_path: Path) -> None:
    path = tmp_path / "n.parquet"
    pq.write_table(pa.table({"n": [3, 1, 2, 5]}), path)
    with warnings.catch_warnings(action="error"):
        table = select(
            "select n from parquet_rows($path) where n < $most order by n", path=path, most=5
        )
    assert table["n"].to_pylist() == [1, 2, 3]


def test_tokens_are_stored_byte_stream_split_and_read_back_bit_by_bit(tmp_path: Path) -> None:
    table = pa.table(
        {
            "name": ["a", "a"],
            "tokens": pa.array([[1, 2], []], pa.list_(pa.int32())),
            "logprobs": pa.array([[-0.1, 0.0], []], pa.list_(pa.float32())),
            "mask": pa.array([[0, 1], []], pa.list_(pa.int8())),
        }
    )
    path = write_table(table, tmp_path / "deep" / "t.parquet")
    assert pq.read_table(path).equals(table)
    group = pq.ParquetFile(path).metadata.row_group(0)
    columns = [group.column(number) for number in range(4)]
    assert {column.compression for column in columns} == {"ZSTD"}
    assert ["BYTE_STREAM_SPLIT" in column.encodings for column in columns] == [
        False,
        True,
        True,
        False,
    ]
    assert [path.name for path in path.parent.iterdir()] == ["t.parquet"]


@pytest.mark.parametrize("start", [0, 1, 2])
def test_lists_are_arrays_however_the_column_was_cut(start: int) -> None:
    lists = [[1, 2], [], [3], [4, 5]]
    column = pa.chunked_array([pa.array(lists, pa.list_(pa.int32()))] * 2)
    cut = column.slice(start)
    assert [array.tolist() for array in arrays(cut)] == (lists * 2)[start:]
    assert arrays(column.slice(8)) == []


KINDS = {".py", ".sql"}
ODD = st.text(st.sampled_from("ab=*?[]{}!~%'\"$- .é,;:\n"), min_size=1, max_size=12)
"""Names of folders with what DuckDB, a shell or an address takes for more than a name."""


@given(ODD.filter(lambda name: name not in (".", "..")), st.booleans())
def test_a_path_is_that_of_one_file_whatever_it_is_called(name: str, relative: bool) -> None:
    with TemporaryDirectory() as place, chdir(place):
        folder = Path(name) if relative else Path(place, name)
        other = Path("b" if name[0] == "a" else "a")
        for beside in (folder, other):
            beside.mkdir(exist_ok=True)
            pq.write_table(pa.table({"a": [str(beside)]}), beside.absolute() / "d.parquet")
        found = select("from parquet_rows($path)", path=folder / "d.parquet")
    assert found.to_pylist() == [{"a": str(folder)}]


@pytest.mark.parametrize("name", ["seed=3", "exp[1]", "exp?", "s*", "run\\1"])
def test_no_query_takes_a_folder_s_name_for_data_or_for_a_pattern(
    tmp_path: Path, name: str
) -> None:
    for folder, seed in ((tmp_path / name, 1), (tmp_path / "exp1", 2)):
        folder.mkdir()
        pq.write_table(pa.table({"seed": [seed]}), folder / "d.parquet")
        (folder / "d.jsonl").write_text(f'{{"seed": {seed}}}\n')
    parquet, lines = tmp_path / name / "d.parquet", tmp_path / name / "d.jsonl"
    assert select("from parquet_rows($path)", path=[parquet]).to_pylist() == [{"seed": 1}]
    [read] = select("from json_lines($path)", path=lines).to_pylist()
    assert read["json"] == '{"seed": 1}'


def test_every_query_reads_files_by_the_macros_alone() -> None:
    folders = [Path(__file__).parents[2] / name for name in ("tasks", "flows", "adapters")]
    files = [file for folder in folders for file in folder.rglob("*") if file.suffix in KINDS]
    reads = re.compile(r"\bfrom\s+(read_(parquet|csv|ndjson|json|text|blob)\w*|glob)\(\s*[$'f]")
    assert [file.name for file in files if reads.search(file.read_text())] == ["prelude.sql"]


JSON = st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=40)


@given(st.lists(JSON), st.sampled_from([0, 100, 127, 128, 16_383, 16_384]))
def test_a_value_of_a_footer_is_read_without_a_library(value: list[object], length: int) -> None:
    value = [*value, "x" * length]
    text = json.dumps({"more": value})
    table = pa.table({"a": [1]})
    with TemporaryDirectory() as folder:
        path = Path(folder, "one.parquet")
        write_parts([table], table.schema, path, lambda: {"ratchet.tokens": text, "z": "[]"})
        assert read_footer(path, "ratchet.tokens") == {"more": value}
        assert json.loads(pq.read_metadata(path).metadata[b"ratchet.tokens"]) == {"more": value}
