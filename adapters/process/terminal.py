"""The terminal and the standard streams: whatever is printed, and wherever, is safe.

A stream may be closed (`>&-`), a pipe whose reader has gone (`| head -1`), of an encoding without
the letters that are written, or a file on a full disk: a command's work ends with its own status.
Errors of agents, names of measures, and words of data and models are printed as well as ours, so
whatever is printed goes through `say`, `show` or `write_data`.
"""

import codecs
import errno
import json
import os
import re
import shutil
import sys
from contextlib import suppress
from functools import partial
from io import BufferedWriter, FileIO, TextIOWrapper
from textwrap import fill
from typing import TextIO
from unicodedata import category

from typing_extensions import Buffer

WIDTH = 100
"""Letters of a line that goes to no terminal, and the most of a line of prose."""
UNBOUNDED = 100_000
"""Letters of a line that nothing shortens."""
NARROWEST = 60
"""The fewest letters of a line of prose, however narrow the terminal is."""
WHOLE = re.compile(
    r"^\S+ {2,}(?:ratchet |wandb |[~/]).*"
    r"|`[^`]*`"
    r"|(?<!\w)(['\"]).{0,58}?\1(?!\w)"
    r"|(?<!\S)[~/]\S*(?: \S+/\S*)*"
)
"""What is not broken: a command or a path behind its label, a short quotation, and a path."""
LABEL, INDENT = re.compile(r"ratchet: |\S* {2,}"), 4
"""Label of a line, such as `ratchet: `. Wrapped lines are indented by its width, or else by 4."""
KEPT = "\0"
"""Stands for a space at which a line is not broken."""


CONTROLS = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Categories of characters that a terminal obeys or hides: controls, formats, ends of lines."""
JOINERS = "\u200c\u200d"
"""Formats that letters and emojis of some scripts need, and that change no others."""


PLAIN_LETTERS = "ratchet-plain"
"""Name of our way to write letters that a stream's encoding does not have."""
IN_ASCII = {"→": "->", "–": "-", "—": "-", "…": "...", "·": "*", "−": "-", "×": "x"}

STDOUT, STDERR = 1, 2
GONE = {errno.EPIPE, errno.EIO, errno.ECONNRESET, errno.ESHUTDOWN}
"""Errors of a stream that nobody reads: a reader that has ended, a terminal that is closed."""


def terminal_width() -> int:
    """Return the width of the terminal, or of COLUMNS; what goes elsewhere may have any width."""
    if not (sys.stdout.isatty() or os.environ.get("COLUMNS")):
        return UNBOUNDED
    return shutil.get_terminal_size((WIDTH, 0)).columns


def table_width() -> int:
    """Return the width of a table among prose, whose lines `say` would break in a terminal."""
    return min(terminal_width(), WIDTH) if sys.stdout.isatty() else terminal_width()


def visible(text: str) -> str:
    """Write what a terminal would obey or hide in a text as Python does, such as \\x1b.

    Ends of lines and tabs stay.
    """
    return _escape(text.replace("\r\n", "\n"), JOINERS + "\n\t")


def on_one_line(text: str) -> str:
    """Write a text as `visible` does, with its ends of lines and tabs as \\n and \\t."""
    return _escape(text, JOINERS)


def hanging(text: str, letters: int = INDENT) -> str:
    """Indent the lines after the first, so that no line of a text looks like a label."""
    first, *others = text.split("\n")
    return "\n".join([first, *(f"{' ' * letters}{line}" if line else "" for line in others)])


def say(text: str, stream: TextIO | None = None) -> None:
    """Print prose, to stdout by default; only a terminal gets its long lines broken."""
    printed, text = stream or sys.stdout, visible(text)
    if printed.isatty():
        columns = os.get_terminal_size(printed.fileno()).columns or WIDTH
        text = break_lines(text, max(NARROWEST, min(WIDTH, columns)))
    show(text, printed)


def show(text: str, stream: TextIO | None = None) -> None:
    """Print a text whose lines are not to be broken, to stdout by default."""
    print(visible(text), file=stream or sys.stdout, flush=True)


def write_data(data: bytes) -> None:
    """Write what programs read to stdout, byte by byte; a terminal is shown it as any text."""
    if sys.stdout.isatty():
        show(data.decode().removesuffix("\n"))
    else:
        sys.stdout.buffer.write(data)
        sys.stdout.flush()


def write_json(value: object) -> None:
    """Write a value to stdout as JSON, for programs."""
    write_data(f"{json.dumps(value, indent=2, ensure_ascii=False)}\n".encode())


def break_lines(text: str, width: int) -> str:
    """Break the lines of prose that are longer than `width`, with a hanging indent.

    A word, a path, a command or a short quotation that is longer stays on a line of its own.
    """
    return "\n".join(map(partial(_break_line, width=width), text.splitlines()))


def _break_line(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    kept = WHOLE.sub(lambda found: found[0].replace(" ", KEPT), line)
    label = LABEL.match(line)
    broken = fill(
        kept,
        width,
        subsequent_indent=" " * (label.end() if label else INDENT),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return broken.replace(KEPT, " ")


def _escape(text: str, kept: str) -> str:
    """Write the CONTROLS of a text that are not to be `kept` as escapes."""
    if text.isprintable():
        return text
    return "".join(
        one.encode("unicode_escape").decode()
        if category(one) in CONTROLS and one not in kept
        else one
        for one in text
    )


class _LastingFile(FileIO):
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
    the next file to be opened would be stdout.
    """
    codecs.register_error(PLAIN_LETTERS, _write_plainly)
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
    reason = raw.reason if isinstance(raw, _LastingFile) else None
    return reason is not None and reason.errno not in GONE


def _lasting(descriptor: int, before: TextIO | None) -> TextIOWrapper:
    """Return a stream in place of the one before, with its encoding and its buffer's size."""
    encoding = before.encoding if before else "utf-8"
    in_lines = descriptor == STDERR or before is None or bool(before.line_buffering)
    if before is not None:
        with suppress(OSError):
            before.flush()
    raw = BufferedWriter(_LastingFile(descriptor, "w", closefd=False))
    return TextIOWrapper(raw, encoding, PLAIN_LETTERS, line_buffering=in_lines)


def _write_plainly(error: UnicodeError) -> tuple[str, int]:
    """Return letters that an encoding does not have, spelt in ASCII, and where to go on."""
    assert isinstance(error, UnicodeEncodeError)
    letters = error.object[error.start : error.end]
    plain = "".join(IN_ASCII.get(one, one) for one in letters)
    return plain.encode("ascii", "backslashreplace").decode(), error.end
