"""The command line of a program in Python, taken apart: its interpreter, the program, its words."""

import ast
import re
import shlex
import shutil
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from adapters.process.program import NoCommand
from adapters.programs.fork_server import BY_MODULE, BY_PATH, BY_TEXT

INTERPRETER = re.compile(r"(python|pypy)[\d.]*")
"""Name of an interpreter of Python."""

LONG_SHEBANG = re.compile(r"'''exec' (.+) \"\$0\" \"\$@\"")
"""Second line of a script of pip's whose interpreter's path is too long for the first."""

WITH_A_WORD = ("-W", "-X")
"""Options of an interpreter that take a word."""


@dataclass(frozen=True)
class PythonLine:
    """A program in Python: the words of its interpreter, how it is named, and its own words.

    `own` are the packages of a script that only starts them.
    """

    interpreter: tuple[str, ...]
    how: str
    words: tuple[str, ...]
    own: tuple[str, ...] = ()


def read_python_line(line: str, words: Sequence[str]) -> PythonLine:
    """Take the words of a command line apart; NoCommand if they run no program in Python."""
    first = str(Path(shutil.which(words[0]) or words[0]).absolute())
    if INTERPRETER.fullmatch(Path(first).name):
        return _of_interpreter(line, first, words[1:])
    with Path(first).open("rb") as file:
        beginning = file.read(2)
        text = file.read().decode(errors="replace") if beginning == b"#!" else ""
    python = _of_shebang(text)
    if python is None:
        raise NoCommand(
            f"{first} begins with no line that names an interpreter of Python, and the agent "
            f"'forks:{line}' is a program in Python; write forks:PYTHON -m MODULE, or command:"
        )
    return PythonLine(python, BY_PATH, (first, *words[1:]), (*_imported(text),))


def _of_interpreter(line: str, python: str, words: Sequence[str]) -> PythonLine:
    options, left = [python], deque(words)
    while left:
        word = left.popleft()
        if word in ("-m", "-c") and left:
            return PythonLine((*options,), BY_MODULE if word == "-m" else BY_TEXT, (*left,))
        if word in WITH_A_WORD and left:
            options += [word, left.popleft()]
        elif re.fullmatch(r"-[A-Za-z]+", word) and not {"m", "c"} & {*word}:
            options.append(word)
        elif not word.startswith("-"):
            return PythonLine((*options,), BY_PATH, (word, *left))
        else:
            break
    raise NoCommand(
        f"the agent 'forks:{line}' names no program after its interpreter and the options of that; "
        "write forks:PYTHON -m MODULE, or forks:PYTHON SCRIPT"
    )


def _of_shebang(text: str) -> tuple[str, ...] | None:
    """Return the words of the interpreter that a script names after its `#!`, if it is Python."""
    first, _, rest = text.partition("\n")
    words = shlex.split(first)
    if words and (found := LONG_SHEBANG.match(rest)):
        words = shlex.split(found[1])
    if words and Path(words[0]).name == "env":
        words = words[2:] if words[1:2] == ["-S"] else words[1:]
    python = shutil.which(words[0]) if words else None
    if python is None or not INTERPRETER.fullmatch(Path(words[0]).name):
        return None
    return (str(Path(python).absolute()), *words[1:])


def _imported(text: str) -> Iterator[str]:
    """Yield the packages that a script imports in its first level."""
    for node in ast.parse(f"#!{text}").body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module.partition(".")[0]
        elif isinstance(node, ast.Import):
            yield from (name.name.partition(".")[0] for name in node.names)
