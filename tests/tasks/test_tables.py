"""A query and its parameters → Arrow → Parquet."""

import warnings
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.storage.tables import arrays, select, write


def test_a_query_is_answered_in_its_order_with_its_parameters(tmp_path: Path) -> None:
    path = tmp_path / "n.parquet"
    pq.write_table(pa.table({"n": [3, 1, 2, 5]}), path)
    with warnings.catch_warnings(action="error"):
        table = select(
            "select n from read_parquet($path) where n < $most order by n", path=path, most=5
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
    path = write(table, tmp_path / "deep" / "t.parquet")
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
