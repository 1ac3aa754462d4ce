"""A text → its rows, by value: JSON lines, a JSON array or CSV.

Nothing is guessed: the first line of a CSV is its header. NaN, which pandas writes for a missing
value, is None; infinity is refused.
"""

import csv
import io
import json
import logging
import sys
from collections.abc import Iterable, Iterator
from json import JSONDecoder
from math import inf
from typing import IO, Any

import psutil

from ratchet.adapters.errors import UserError

LONGEST_MESSAGE = 300
"""Characters of a refusal."""

log = logging.getLogger(__name__)


class DatasetError(UserError):
    """Refusal of a dataset that cannot be read as the recipe asks, in few words."""

    def __init__(self, message: str) -> None:
        if len(message) > LONGEST_MESSAGE:
            end = LONGEST_MESSAGE // 3
            message = f"{message[: LONGEST_MESSAGE - end - 3]} … {message[-end:]}"
        super().__init__(message)


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


def check_row(row: Any) -> None:
    """Refuse (BadRow) a row that is no object, or has a value that JSON lacks."""
    if not isinstance(row, dict):
        raise BadRow(f"is no JSON object: {row!r:.60}; give an object a row")
    try:
        json.dumps(row, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        before = error.object[max(0, error.start - 20) : error.start]
        raise BadRow(
            f"has behind {before!r} what is no UTF-8, or half of a surrogate pair; write it anew"
        ) from error
    except (ValueError, RecursionError) as error:
        raise BadRow(
            f"has an infinite number, or nests too deep ({error}); give a number, or null"
        ) from error


def check_names(names: list[str]) -> None:
    if twice := [name for name in names if names.count(name) > 1]:
        raise BadFile(f"has the column {twice[0][:40]!r} twice; leave one out")


def read_csv(opened: IO[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a CSV: texts, and None for an empty cell."""
    csv.field_size_limit(sys.maxsize)
    lines = csv.reader(opened, strict=True)
    try:
        names = [name or f"column{at}" for at, name in enumerate(next(lines, []))]
        check_names(names)
        for cells in filter(None, lines):
            if len(cells) != len(names):
                raise BadRow(f"has {len(cells)} cells, and the header {len(names)}; mend the line")
            yield {name: cell or None for name, cell in zip(names, cells, strict=True)}
    except csv.Error as error:
        raise BadRow(f"is no CSV ({error}); mend its quotes") from error


def read_json_lines(opened: IO[str]) -> Iterator[Any]:
    """Yield the row of each line that is not blank."""
    return (_parse(line) for line in opened if not line.isspace())


def read_json(opened: IO[str]) -> Iterator[Any]:
    """Yield the rows of one array, or of JSON lines, since some files of lines end in .json."""
    text = opened.read()
    if not text.lstrip().startswith("["):
        yield from read_json_lines(io.StringIO(text))
        return
    try:
        yield from _parse(text)
    except BadRow as error:
        raise BadFile(str(error)) from error


def _parse(text: str) -> Any:
    try:
        return DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"is no JSON ({error}); mend that") from error


def as_object(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; BadRow if it gives a name twice, since one value would be lost."""
    found = dict(pairs := [*pairs])
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadRow(f"gives {twice[:40]!r} twice in one object; leave one out")
    return found


DECODER = JSONDecoder(
    parse_constant={"NaN": None, "Infinity": inf, "-Infinity": -inf}.get,
    object_pairs_hook=as_object,
)
"""Reader of what Python and pandas write: NaN says that a value is missing."""
