"""Faults of a file of rows: what JSON has no word for, and what memory does not hold."""

from math import isfinite
from typing import Any

import psutil


class BadFile(Exception):
    """Fault of a file; its text goes on after the file's name."""


class BadRow(Exception):
    """Fault of the row that is being read; its text goes on after the row's number."""


def check_memory(size: int) -> None:
    """Refuse (BadFile) a file of so many unpacked bytes, which its rows take at least."""
    if size > psutil.virtual_memory().available // 2:
        raise BadFile(
            f"unpacks to {size / 2**30:.2f} GiB, which is more than half of the free memory; split "
            "the file, or leave rows out"
        )


def check_value(value: Any) -> None:
    """Refuse (BadRow) a value, also an inner one, that JSON lacks."""
    if isinstance(value, list | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            check_value(inner)
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
