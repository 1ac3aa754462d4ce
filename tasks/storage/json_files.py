"""JSON files of a run, which carry their checksums: whole files, and logs of lines.

A whole file ends with the SHA-256 of its bytes under KEY, in its object or in its last row; the
digest is computed with zeros in its place. A log is appended to, so each of its lines ends with
the CRC-32 of its own bytes. Other readers see one more key.
"""

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.storage.checksums import Damaged, remedy
from tasks.storage.files import append_line, is_written, read_bytes, write_text

KEY, LINE_KEY = "sha256", "crc32"
BLANK, LINE_BLANK = "0" * 64, "0" * 8

Row = dict[str, Any]


def write_json(path: Path, value: Mapping[str, object]) -> Path:
    """Write an object, whole or not at all; return the path."""
    return _write(path, json.dumps({**value, KEY: BLANK}, indent=2) + "\n")


def read_json(path: Path) -> Row:
    """Read an object that `write_json` wrote; Damaged if the file has changed since."""
    value: Row = json.loads(_intact(path))
    del value[KEY]
    return value


def write_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    """Write rows, one a line, whole or not at all; return the path. There must be a row."""
    *others, last = rows
    lines = [*others, {**last, KEY: BLANK}]
    return _write(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def read_rows(path: Path) -> list[Row]:
    """Read rows that `write_rows` wrote; Damaged if the file has changed since."""
    # Not splitlines(): a text may hold a line separator that JSON leaves as it is.
    rows: list[Row] = [json.loads(line) for line in _intact(path).split("\n") if line]
    del rows[-1][KEY]
    return rows


def append_row(path: Path, row: Mapping[str, object]) -> None:
    """Append a line to a log durably: the line is on disk when this returns.

    Damaged if the log is: a damaged end would be taken for a torn one, and cut.
    """
    read_log(path)
    line = json.dumps({**row, LINE_KEY: LINE_BLANK}, allow_nan=False)
    append_line(path, _with_crc(line.encode()).decode())


def read_log(path: Path) -> list[Row]:
    """Read the whole lines of a log, none if there is no file; Damaged if a line has changed."""
    if not is_written(path):
        return []
    *lines, torn = read_bytes(path).split(b"\n")
    if _is_intact(torn[:-1]):  # a whole line whose end has changed
        lines.append(torn)
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        if not _is_intact(line):
            raise Damaged(
                f"line {number} of {path} is damaged: its checksum does not fit. {remedy(path)}"
            )
        row: Row = json.loads(line)
        del row[LINE_KEY]
        rows.append(row)
    return rows


def _write(path: Path, text: str) -> Path:
    place = text.rindex(BLANK)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return write_text(path, text[:place] + digest + text[place + len(BLANK) :])


def _intact(path: Path) -> str:
    data = read_bytes(path)
    place = data.rfind(f'"{KEY}": "'.encode()) + len(f'"{KEY}": "')
    blank = data[:place] + BLANK.encode() + data[place + len(BLANK) :]
    digest = hashlib.sha256(blank).hexdigest().encode()
    if data[place : place + len(BLANK)] != digest:
        raise Damaged(
            f"{path} is damaged: its checksum does not fit its {len(data)} bytes. {remedy(path)}"
        )
    return data.decode()


def _is_intact(line: bytes) -> bool:
    return line == _with_crc(line)


def _with_crc(line: bytes) -> bytes:
    """Return a line with its CRC-32 in the place before its end."""
    begin = line[: -len(LINE_BLANK + '"}')]
    crc = zlib.crc32(begin + f'{LINE_BLANK}"}}'.encode())
    return begin + f'{crc:08x}"}}'.encode()
