"""The terminal: how wide it is, and prose whose lines are broken at words to fit it."""

import os
import re
import shutil
import sys
from functools import partial
from textwrap import fill
from typing import TextIO

WIDTH = 100
"""Letters of a line that goes to no terminal, and the most of a line of prose."""
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
"""Beginning of a line, below whose end the rest goes on, and the indent where there is none."""
KEPT = "\0"
"""Stands for a space at which a line is not broken."""


def terminal_width() -> int:
    """Return the letters of a line of the terminal, or WIDTH where there is none."""
    return shutil.get_terminal_size((WIDTH, 0)).columns


def say(text: str, stream: TextIO | None = None) -> None:
    """Print prose, to stdout by default; only a terminal gets its long lines broken."""
    printed = stream or sys.stdout
    if printed.isatty():
        columns = os.get_terminal_size(printed.fileno()).columns or WIDTH
        text = break_lines(text, max(NARROWEST, min(WIDTH, columns)))
    print(text, file=printed, flush=True)


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
