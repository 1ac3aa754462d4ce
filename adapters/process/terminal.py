"""The terminal and the standard streams: whatever is printed is safe for a terminal.

Errors of agents, names of measures, and words of data and models are printed as well as ours, so
whatever is printed goes through `show` or `write_data`.
"""

import json
import os
import shutil
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO
from unicodedata import category

WIDTH = 100
"""Letters of a line where the terminal tells no width."""
UNBOUNDED = 100_000
"""Letters of a line that nothing shortens."""
INDENT = 4
"""Letters by which the lines after the first of a text are indented."""

CONTROLS = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Categories of characters that a terminal obeys or hides: controls, formats, ends of lines."""
JOINERS = "\u200c\u200d"
"""Formats that letters and emojis of some scripts need, and that change no others."""


def terminal_width() -> int:
    """Return the width of the terminal, or of COLUMNS; what goes elsewhere may have any width."""
    if not (sys.stdout.isatty() or os.environ.get("COLUMNS")):
        return UNBOUNDED
    return shutil.get_terminal_size((WIDTH, 0)).columns


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


def show(text: str, stream: TextIO | None = None) -> None:
    """Print a text, to stdout by default."""
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


def open_streams() -> None:
    """Have letters that a standard stream's encoding lacks be written as escapes.

    A closed stream becomes /dev/null: otherwise the next file to be opened would be stdout.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # It gets the lowest number that is free, which is its own.
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115
            os.set_inheritable(getattr(sys, name).fileno(), True)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
