"""JSON files of a run, which carry their checksums: whole files, and logs of lines.

A whole file ends with its SHA-256 under SEAL (`tasks.storage.checksums`). A log is appended to, so
each of its lines ends with the CRC-32 of its own bytes. Other readers see one more key.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.storage.checksums import BLANK, Damaged, intact, remedy, stamp
from tasks.storage.files import appearing, append_line, is_written, read_bytes

SEAL, LINE_SEAL = "sha256", "crc32"
LINE_BLANK = "0" * 8

MARK = f'"{SEAL}": "'.encode()
"""What stands before the digest."""

JsonRow = dict[str, Any]


def write_json(path: Path, value: Mapping[str, object]) -> Path:
    """Write an object, whole or not at all; return the path."""
    return _write(path, json.dumps({**value, SEAL: BLANK}, indent=2) + "\n")


def read_json(path: Path) -> JsonRow:
    """Read an object that `write_json` wrote; Damaged if the file has changed since."""
    value: JsonRow = json.loads(intact(path, MARK))
    del value[SEAL]
    return value


def write_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    """Write rows, one a line, whole or not at all; return the path. There must be a row."""
    *others, last = rows
    lines = [*others, {**last, SEAL: BLANK}]
    return _write(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def read_rows(path: Path) -> list[JsonRow]:
    """Read rows that `write_rows` wrote; Damaged if the file has changed since."""
    rows: list[JsonRow] = [json.loads(line) for line in intact(path, MARK).splitlines()]
    del rows[-1][SEAL]
    return rows


def append_row(path: Path, row: Mapping[str, object]) -> None:
    """Append a line to a log durably: the line is on disk when this returns.

    Damaged if the log is: a damaged end would be taken for a torn one, and cut.
    """
    read_log(path)
    line = json.dumps({**row, LINE_SEAL: LINE_BLANK}, allow_nan=False)
    append_line(path, _with_crc(line.encode()).decode())


def read_log(path: Path) -> list[JsonRow]:
    """Read the whole lines of a log, none if there is no file; Damaged if a line has changed."""
    if not is_written(path):
        return []
    *lines, torn = read_bytes(path).split(b"\n")
    if _is_intact(torn[:-1]):  # a whole line whose end has changed
        lines.append(torn)
    rows: list[JsonRow] = []
    for number, line in enumerate(lines, 1):
        if not _is_intact(line):
            raise Damaged(
                f"line {number} of {path} is damaged: its checksum does not fit. {remedy(path)}"
            )
        row: JsonRow = json.loads(line)
        del row[LINE_SEAL]
        rows.append(row)
    return rows


def _write(path: Path, text: str) -> Path:
    with appearing(path) as aside:
        aside.write_bytes(text.encode())
        stamp(aside, MARK)
    return path


def _is_intact(line: bytes) -> bool:
    return line == _with_crc(line)


def _with_crc(line: bytes) -> bytes:
    """Return a line with its CRC-32 before its end."""
    begin = line[: -len(LINE_BLANK + '"}')]
    crc = zlib.crc32(begin + f'{LINE_BLANK}"}}'.encode())
    return begin + f'{crc:08x}"}}'.encode()
