"""Bounds on what a file of rows may hold, which no honest file meets, and its two refusals."""

from math import isfinite
from typing import Any

import psutil

LONGEST_ROW = 2**24
"""Bytes of a row in JSON, which is what a run's shards take."""
MOST_COLUMNS = 4096
DEEPEST = 64
"""Lists and objects within one another."""

LEAST_MEMORY, EXPANSION = 2**30, 100
"""Bytes that the rows of any file may take, and how many times the file's size if that is more."""
ROW_MEMORY, VALUE_MEMORY = 256, 100
"""Estimates of what Python keeps for a row, and for a value beside its text."""


class BadFile(Exception):
    """Fault of a file; its text goes on after the file's name."""


class BadRow(Exception):
    """Fault of the row that is being read; its text goes on after the row's number."""


class RowMemory:
    """Memory that the rows of a file may still take, by an estimate."""

    def __init__(self, size: int) -> None:
        free = psutil.virtual_memory().available
        self._most = self._left = min(max(LEAST_MEMORY, EXPANSION * size), free // 2)

    def take(self, text: int, values: int, rows: int = 1) -> None:
        """Count bytes of text, values and rows before they are made; BadFile if it is too much."""
        self._left -= text + VALUE_MEMORY * values + ROW_MEMORY * rows
        if self._left < 0:
            raise BadFile(
                f"unpacks to rows of more than {self._most / 2**30:.2f} GiB of memory, which is "
                f"{EXPANSION} times its size or half of what is free; split the file, or leave "
                "rows out"
            )


def check_columns(count: int) -> None:
    """Refuse (BadFile) a table of more columns than are read."""
    if count > MOST_COLUMNS:
        raise BadFile(f"has {count:,} columns, and at most {MOST_COLUMNS:,} are read; give fewer")


def check_value(value: Any, depth: int = 2) -> None:
    """Refuse (BadRow) a value, also an inner one, that JSON lacks or that is nested too deep."""
    if isinstance(value, list | dict):
        if depth > DEEPEST:
            raise BadRow(f"nests lists and objects more than {DEEPEST} deep; give flatter ones")
        for inner in value.values() if isinstance(value, dict) else value:
            check_value(inner, depth + 1)
        for name in value if isinstance(value, dict) else ():
            check_value(name)
    elif isinstance(value, float) and not isfinite(value):
        raise BadRow("is infinite; give a number, or null")
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise BadRow(
                "holds half of a surrogate pair, which is no character; write the text anew"
            ) from error


def check_row(row: Any) -> None:
    """Refuse (BadRow) a row with a value that `check_value` refuses; name its column."""
    for column, value in row.items() if isinstance(row, dict) else [("0", row)]:
        try:
            check_value(column)
            check_value(value)
        except BadRow as error:
            raise BadRow(f"is refused: its column {column[:40]!r} {error}") from error
