"""The standard streams of a command: whatever becomes of them, its work ends with its own status.

A stream may be closed (`>&-`), a pipe whose reader has gone (`| head -1`), of an encoding without
the letters that are written, or a file on a full disk.
"""

import codecs
import errno
import os
import sys
from contextlib import suppress
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import TextIO

from typing_extensions import Buffer

PLAIN = "ratchet-plain"
"""Name of the way in which letters are written that a stream's encoding does not have."""
IN_ASCII = {"→": "->", "–": "-", "—": "-", "…": "...", "·": "*", "−": "-", "×": "x"}

STDOUT, STDERR = 1, 2
GONE = {errno.EPIPE, errno.EIO, errno.ECONNRESET, errno.ESHUTDOWN}
"""Errors of a stream that nobody reads: a reader that has ended, a terminal that is closed."""


class _Lost(FileIO):
    """A stream's descriptor, which takes what cannot be written, and keeps the first reason."""

    reason: OSError | None = None

    def write(self, data: Buffer, /) -> int:
        if self.reason is None:
            try:
                return super().write(data)
            except OSError as error:
                self.reason = error
                if error.errno not in GONE and self.fileno() != STDERR:
                    said = f"ratchet: stdout could not be written ({error.strerror})\n"
                    with suppress(OSError):
                        os.write(STDERR, said.encode())
        return memoryview(data).nbytes


def open_streams() -> None:
    """Have the standard streams take whatever is written, for as long as the process runs.

    A closed one becomes /dev/null, here and in the processes that are started from here: otherwise
    the next file that is opened would be stdout.
    """
    codecs.register_error(PLAIN, _write_plainly)
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest that is free, and so this one
            os.set_inheritable(opened, True)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    if sys.stdout in (None, sys.__stdout__):
        sys.stdout = _lasting(STDOUT, sys.stdout)
    if sys.stderr in (None, sys.__stderr__):
        sys.stderr = _lasting(STDERR, sys.stderr)


def is_lost(stream: TextIO) -> bool:
    """Return whether a stream that somebody reads could not be written."""
    stream.flush()
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    reason = raw.reason if isinstance(raw, _Lost) else None
    return reason is not None and reason.errno not in GONE


def _lasting(descriptor: int, before: TextIO | None) -> TextIOWrapper:
    """Return a stream in place of the one before, with its encoding and its buffer's size."""
    encoding = before.encoding if before else "utf-8"
    in_lines = descriptor == STDERR or before is None or bool(before.line_buffering)
    if before is not None:
        with suppress(OSError):
            before.flush()
    raw = BufferedWriter(_Lost(descriptor, "w", closefd=False))
    return TextIOWrapper(raw, encoding, PLAIN, line_buffering=in_lines)


def _write_plainly(error: UnicodeError) -> tuple[str, int]:
    """Return the letters that an encoding does not have in those of ASCII, and where to go on."""
    assert isinstance(error, UnicodeEncodeError)
    letters = error.object[error.start : error.end]
    plain = "".join(IN_ASCII.get(one, one) for one in letters)
    return plain.encode("ascii", "backslashreplace").decode(), error.end
