"""JSON lines, or an array of objects → rows, as Python and pandas write them."""

import re
from collections.abc import Iterator
from json import JSONDecodeError, JSONDecoder
from math import isinf
from typing import IO, Any

from tasks.examples.bounds import DEEPEST, LONGEST_ROW, BadFile, BadRow, RowMemory, check_row

SURROGATES = "\\ud", "\\uD"
"""Beginnings of escapes for a half of a character."""
SPACE = re.compile(r"[ \t\r\n]*")


def read_json_lines(opened: IO[bytes], memory: RowMemory) -> Iterator[Any]:
    """Yield the row of each line that is not blank."""
    while line := opened.readline(LONGEST_ROW + 1):
        _check_length(len(line))
        text = _decode(line).strip()
        memory.take(len(line), _count_values(text))
        if text:
            row, end = _parse(text, 0)
            if end < len(text):
                raise BadRow(
                    f"goes on after its object with {text[end : end + 20]!r}; give an object a line"
                )
            yield row


def read_json_array(opened: IO[bytes], memory: RowMemory) -> Iterator[Any]:
    """Yield the rows of one array, or those of JSON lines, which some call so as well."""
    begins = opened.read(1)
    while begins.isspace():
        begins = opened.read(1)
    opened.seek(-len(begins), 1)
    if begins != b"[":
        yield from read_json_lines(opened, memory)
        return
    data = opened.read()
    memory.take(2 * len(data), 0, 0)
    text = _decode(data)
    del data
    yield from _elements(text, memory)


def _elements(text: str, memory: RowMemory) -> Iterator[Any]:
    """Yield the elements of an array, each as it is parsed."""
    at = _skip(text, 1)
    while text[at : at + 1] != "]" or text[at - 1] == ",":
        row, end = _parse(text, at)
        _check_length(end - at)
        memory.take(0, _count_values(text[at:end]))
        yield row
        at = _skip(text, end)
        if text[at : at + 1] == ",":
            at = _skip(text, at + 1)
        elif text[at : at + 1] != "]":
            raise BadRow(f"has {text[at : at + 20]!r} before it in place of a comma; mend that")
    if text[_skip(text, at + 1) :]:
        raise BadFile("goes on after its array; give one array, or an object a line")


def _parse(text: str, at: int) -> tuple[Any, int]:
    """Parse the value that begins at a place; return it and the place after it."""
    try:
        row, end = DECODER.raw_decode(text, at)
    except _Infinite:
        check_row(JSONDecoder().raw_decode(text, at)[0])
        raise
    except JSONDecodeError as error:
        shown = text[error.pos : error.pos + 20]
        raise BadRow(f"is no JSON ({error.msg} at {shown!r}); mend that") from error
    except RecursionError as error:
        raise BadRow(
            f"nests lists and objects more than {DEEPEST} deep; give flatter ones"
        ) from error
    except ValueError as error:  # Python reads no longer integer
        raise BadRow("has an integer of thousands of digits; give a number, or a text") from error
    if _count_brackets(text, at, end) > DEEPEST or any(
        text.find(half, at, end) >= 0 for half in SURROGATES
    ):
        check_row(row)
    return row, end


class _Infinite(BadRow):
    """An infinite number, whose column is not known yet."""


def _read_constant(name: str) -> None:
    if name != "NaN":
        raise _Infinite(f"holds {name}; give a number, or null")


def _read_float(digits: str) -> float:
    number = float(digits)
    if isinf(number):
        raise _Infinite(f"holds {digits:.20}; give a number, or null")
    return number


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; BadRow if it gives a name twice, of which one would be lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadRow(f"gives {twice[:40]!r} twice in one object; leave one out")
    return found


DECODER = JSONDecoder(
    parse_constant=_read_constant, parse_float=_read_float, object_pairs_hook=_object
)
"""Reader of what Python and pandas write: a number that is none says that the value is missing."""


def _decode(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise BadRow(
            f"is no UTF-8 (byte {error.start} is {line[error.start]:#x}); write the file in UTF-8"
        ) from error


def _check_length(length: int) -> None:
    if length > LONGEST_ROW:
        raise BadRow(f"is longer than {LONGEST_ROW // 2**20} MiB; give shorter ones")


def _count_values(text: str) -> int:
    """Count the values of a text from above."""
    return text.count(",") + _count_brackets(text, 0, len(text))


def _count_brackets(text: str, at: int, end: int) -> int:
    """Count the brackets that open: a text is at most as deep."""
    return text.count("[", at, end) + text.count("{", at, end)


def _skip(text: str, at: int) -> int:
    """Return the place after white space."""
    found = SPACE.match(text, at)
    assert found is not None, "white space may be empty"
    return found.end()
