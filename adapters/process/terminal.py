"""The terminal and the standard streams: whatever is printed is safe for a terminal.

Errors of agents, names of measures, and words of data and models are printed as well as ours, so
whatever is printed goes through `say`, `show` or `write_data`.
"""

import codecs
import json
import os
import re
import shutil
import sys
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from textwrap import fill
from typing import TextIO
from unicodedata import category

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


def open_streams() -> None:
    """Have letters that a standard stream's encoding lacks be written in ASCII.

    A closed stream becomes /dev/null: otherwise the next file to be opened would be stdout.
    """
    codecs.register_error(PLAIN_LETTERS, _write_plainly)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # It gets the lowest number that is free, which is its own.
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115
            os.set_inheritable(getattr(sys, name).fileno(), True)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=PLAIN_LETTERS)


def _write_plainly(error: UnicodeError) -> tuple[str, int]:
    """Return letters that an encoding does not have, spelt in ASCII, and where to go on."""
    assert isinstance(error, UnicodeEncodeError)
    letters = error.object[error.start : error.end]
    plain = "".join(IN_ASCII.get(one, one) for one in letters)
    return plain.encode("ascii", "backslashreplace").decode(), error.end
