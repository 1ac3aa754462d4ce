"""Files of lines that only grow, followed: each look reads what was appended since the last."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO


@dataclass(frozen=True)
class Appended:
    """Whole lines that were appended since the last look, without their ends, and a torn one.

    If the file was begun `anew`, they are all its lines.
    """

    lines: list[bytes]
    torn: bytes
    anew: bool


class Tail:
    """Reader of the lines that were appended to a file since its last look.

    A file that was replaced, cut, or changed without growing is read again from its beginning; so
    is one whose line before the appended lines is not the line that was read last. A change of an
    earlier line is not seen if the file has grown since the last look. A torn line is read when it
    is whole. A look opens the file, since a network file system shows other hosts' writes only
    then.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.forget()

    def forget(self) -> None:
        """Have the next look read the whole file."""
        self._offset = 0
        self._last = b""
        self._seen: os.stat_result | None = None

    def read(self) -> Appended:
        """Return what was appended; a file that is not there has no lines."""
        try:
            file = self.path.open("rb", buffering=0)
        except FileNotFoundError:
            known, _ = self._offset, self.forget()
            return Appended([], b"", anew=known > 0)
        with file:
            found = os.fstat(file.fileno())
            if anew := not self._goes_on(file, found):
                self.forget()
            file.seek(self._offset)
            *lines, torn = file.read().split(b"\n")
        if lines:
            self._last = lines[-1] + b"\n"
            self._offset += sum(map(len, lines)) + len(lines)
        self._seen = found
        return Appended(lines, torn, anew)

    def _goes_on(self, file: IO[bytes], found: os.stat_result) -> bool:
        """Return whether the file still begins with the lines that were read."""
        seen = self._seen
        if seen is None:
            return True
        if (found.st_dev, found.st_ino) != (seen.st_dev, seen.st_ino):
            return False
        if found.st_size == seen.st_size and found.st_mtime_ns != seen.st_mtime_ns:
            return False
        file.seek(self._offset - len(self._last))
        return file.read(len(self._last)) == self._last
