"""Records on disk, and the lock of the folder that has them."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from pydantic import BaseModel

from ratchet.durable.files import lock_file, sealed, sync, unsealed, write_file
from ratchet.engine.errors import NotFound, RequestRefused

log = logging.getLogger(__name__)


class StoredRecord(BaseModel):
    """A record on disk; `missing` is the error for a missing entry, with `{}` for its key."""

    missing: ClassVar[str]


Record = TypeVar("Record", bound=StoredRecord)


class Records(Generic[Record]):
    """A folder of JSON records by key, read once and written through.

    A key may contain slashes. A record is durable when `put` returns. Reading and writing are safe
    between threads, because the index is one dict and each file is replaced atomically. A file
    carries the SHA-256 of its record; a damaged file is left where it is, and counts as missing.
    """

    def __init__(self, folder: Path, of: type[Record]) -> None:
        self._folder = folder
        self._missing = of.missing
        self._records: dict[str, Record] = {}
        self.damaged: list[Path] = []
        for path in sorted(folder.rglob("*.json")):
            try:
                record = of.model_validate_json(unsealed(path.read_bytes()))
            except (OSError, ValueError) as error:
                text = "%s is not the %s that was written (%s); it counts as missing"
                log.warning(text, path, of.__name__, error)
                self.damaged.append(path)
            else:
                self._records[str(path.relative_to(folder).with_suffix(""))] = record

    def __contains__(self, key: str) -> bool:
        return key in self._records

    def find(self, key: str) -> Record:
        """Return a record; raise NotFound if it is missing."""
        if key not in self._records:
            raise NotFound(self._missing.format(key))
        return self._records[key]

    def get(self, key: str) -> Record | None:
        return self._records.get(key)

    def values(self) -> list[Record]:
        return list(self._records.values())

    def put(self, key: str, record: Record) -> None:
        write_file(self._path(key), sealed(record.model_dump_json().encode()))
        self._records[key] = record

    def remove(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)
        sync(self._path(key).parent)
        self._records.pop(key, None)

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.json"


@contextmanager
def lock_state(state: Path, patience_seconds: float = 10.0) -> Iterator[None]:
    """Hold the lock of the state folder, because a second engine would not see our writes.

    Wait for the lock a little, because the engine of a killed run takes a moment to exit.
    """
    state.mkdir(parents=True, exist_ok=True)
    with (state / "lock").open("w") as file:
        deadline = time.monotonic() + patience_seconds
        while not lock_file(file):
            if time.monotonic() > deadline:
                raise RequestRefused(
                    f"another engine uses the state folder {state}; stop it, "
                    "or give --state another folder"
                )
            time.sleep(0.05)
        yield
