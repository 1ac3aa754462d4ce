"""Files of a run, which appear whole or not at all: a file that exists is a stage that is done.

All reads and writes of a run's files go through this folder (`tasks/storage`) and the journal.

A whole file carries its own SHA-256, which is computed with zeros in the digest's place. The digest
stands after a key: in Parquet in the footer's metadata, in JSON in the object or in the last row.
Other readers ignore it. Logs, which grow by lines, are in `tasks.storage.logs`.
"""

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeAlias
from uuid import uuid4

from ratchet.adapters.errors import UserError
from ratchet.durable import files
from ratchet.tasks.storage.stages import STAGE

RESERVE_BYTES = 2**24
"""Free space that a disk must have before a file is begun; with less, the run waits."""

DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
SPACE_LOOK_SECONDS = 1.0

FileVersions: TypeAlias = tuple[tuple[int, int] | None, ...]
"""Time of the last change and size of each file; None for a missing file."""

log = logging.getLogger(__name__)

CHECKSUM_KEY = "ratchet.sha256"
BLANK = "0" * 64

PARQUET_KEY = f"{CHECKSUM_KEY}\x18@".encode()
"""Bytes before a Parquet file's digest: the key, and Thrift's header of a string of 64."""

VALUE_HEADER = rb"\x18[\x80-\xff]*[\x00-\x7f]"
"""Thrift's header of a string, which stands between a key of the metadata and its value."""

_AGAIN = "Remove the line and all that follow it, and resume the run: "
REMEDIES = {
    "manifest.json": "Restore it from a copy: nothing else says what the run is bound to",
    "owners.jsonl": "Delete it, and resume the run: it only says who has had the run open",
    "metrics.jsonl": f"{_AGAIN}the steps are measured again",
    "checkpoints.jsonl": f"{_AGAIN}their checkpoints are made again from the recorded datums",
}
"""What to do about a damaged file that is not made from others, by its name."""

SEAL = "sha256"

JSON_KEY = f'"{SEAL}": "'.encode()
"""Bytes before a JSON file's digest."""

JsonRow = dict[str, Any]


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """Yield a path to write to, as `durable.files` does, once the disk has space for it."""
    wait_for_space(path.parent)
    with files.appearing(path) as aside:
        yield aside


@contextmanager
def appearing_folder(path: Path) -> Iterator[Path]:
    """Yield an empty hidden folder, which becomes `path`, durably; UserError if that is there."""
    check_absent(path)
    with files.appearing_folder(path, f".{uuid4().hex[:8]}") as aside:
        yield aside
        check_absent(path)


def check_absent(path: Path) -> None:
    """Refuse (UserError) a path where something exists, which would be written over."""
    if os.path.lexists(path):
        raise UserError(f"{path} exists, and is not written over; give another folder")


def write_text(path: Path, text: str) -> Path:
    """Write `text` to `path`, whole or not at all; return the path."""
    return write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> Path:
    """Write `data` to `path`, whole or not at all; return the path."""
    with appearing(path) as aside:
        aside.write_bytes(data)
    return path


def read_bytes(path: Path) -> bytes:
    return path.read_bytes()


def remove_folder(path: Path) -> None:
    """Remove a folder with its files, if it is there."""
    shutil.rmtree(path, ignore_errors=True)


def query_beside(module: str, name: str = "") -> str:
    """Read `<name>.sql`, or else `<module>.sql`, beside the module of this `__file__`."""
    own = Path(module).with_suffix(".sql")
    return (own.with_stem(name) if name else own).read_text(encoding="utf-8")


def is_written(path: Path) -> bool:
    """Return whether a file is there, and so whether its stage is done."""
    return path.exists()


def is_file(path: Path) -> bool:
    """Return whether a file is there, and neither a folder nor a link to nothing."""
    return path.is_file()


def version_of(paths: Iterable[Path]) -> FileVersions:
    """Return a value that changes when a file changes, or appears."""
    return tuple(_version(path) for path in paths)


def write_note(file: IO[str], text: str) -> None:
    """Write a text that may be lost, such as who holds a lock; a full disk is no error."""
    try:
        os.write(file.fileno(), text.encode())
    except OSError as error:
        if not is_full(error):
            raise


def wait_for_space(folder: Path) -> None:
    """Wait until the disk of a folder, which is made, has RESERVE_BYTES free; log the wait once."""
    folder.mkdir(parents=True, exist_ok=True)
    told = False
    while (free := shutil.disk_usage(folder).free) < RESERVE_BYTES:
        if not told:
            needed = RESERVE_BYTES // 2**20
            text = "the disk of %s is full (%d MiB are free): the run waits until there are %d"
            log.warning(text, folder, free // 2**20, needed)
        told = True
        time.sleep(SPACE_LOOK_SECONDS)


def is_full(error: BaseException) -> bool:
    """Return whether the error says that the disk has no space left."""
    return isinstance(error, OSError) and error.errno in DISK_FULL


def _version(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size


class Damaged(UserError):
    """Refusal of a file that is not as it was written."""


def stamp(path: Path, key: bytes = PARQUET_KEY) -> None:
    """Replace the BLANK after the key by the digest."""
    data = path.read_bytes()
    start = data.rindex(key) + len(key)
    with path.open("r+b") as file:
        file.seek(start)
        file.write(_digest(data, start))


def verified(path: Path) -> Path:
    """Return the path if every byte of the file is as it was written; otherwise Damaged."""
    intact(path)
    return path


def intact(path: Path, key: bytes = PARQUET_KEY) -> bytes:
    """Read the bytes of a file; Damaged if they are not as they were written."""
    data = path.read_bytes()
    found = data.rfind(key)
    start = found + len(key)
    if found < 0:
        raise Damaged(f"{path} is damaged: it has no checksum. {remedy(path)}")
    if data[start : start + len(BLANK)] != _digest(data, start):
        raise Damaged(
            f"{path} is damaged: its checksum does not fit its {len(data)} bytes. {remedy(path)}"
        )
    return data


def read_footer(path: Path, key: str) -> Any:
    """Read a value of JSON from a Parquet file's metadata; Damaged if the file has changed since.

    No library is needed that reads Parquet.
    """
    data = intact(path)
    footer = data[-8 - int.from_bytes(data[-8:-4], "little") :]
    *_, header = re.finditer(re.escape(key.encode()) + VALUE_HEADER, footer)
    return json.JSONDecoder().raw_decode(footer[header.end() :].decode("latin-1"))[0]


def _digest(data: bytes, start: int) -> bytes:
    """Compute the digest that stands at `start`."""
    digest = hashlib.sha256(data[:start])
    digest.update(BLANK.encode())
    digest.update(data[start + len(BLANK) :])
    return digest.hexdigest().encode()


def remedy(path: Path) -> str:
    """Say what to do about a damaged file of a run."""
    if path.name in REMEDIES:
        return REMEDIES[path.name]
    stage = STAGE.get(path.parent.name)
    source = stage.made_of if stage else ""
    homes = [one for one in path.parents[1:4] if (one / source).exists()]
    of = f" of {[*homes, path.parents[1]][0] / source}" if source else ""
    return f"Delete it, and resume the run: it is made anew{of}"


def write_json(path: Path, value: Mapping[str, object]) -> Path:
    """Write an object, whole or not at all; return the path."""
    return _write(path, json.dumps({**value, SEAL: BLANK}, indent=2) + "\n")


def read_json(path: Path) -> JsonRow:
    """Read an object that `write_json` wrote; Damaged if the file has changed since."""
    value: JsonRow = json.loads(intact(path, JSON_KEY))
    del value[SEAL]
    return value


def write_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    """Write rows, one a line, whole or not at all; return the path. There must be a row."""
    *others, last = rows
    lines = [*others, {**last, SEAL: BLANK}]
    return _write(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def read_rows(path: Path) -> list[JsonRow]:
    """Read rows that `write_rows` wrote; Damaged if the file has changed since."""
    rows: list[JsonRow] = [json.loads(line) for line in intact(path, JSON_KEY).splitlines()]
    del rows[-1][SEAL]
    return rows


def _write(path: Path, text: str) -> Path:
    with appearing(path) as aside:
        aside.write_bytes(text.encode())
        stamp(aside, JSON_KEY)
    return path
