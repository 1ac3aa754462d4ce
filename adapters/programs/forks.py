"""Agents that are programs in Python, whose libraries are imported once, and forked for a rollout.

A rollout's process is that of a `command`, but asks a fork server in the program's interpreter to
run the program; see `fork_server.py`.
"""

import logging
import os
import re
import shlex
import shutil
import socket
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import cache
from pathlib import Path
from weakref import finalize

from ratchet.adapters.calls import Example
from ratchet.adapters.clients.current_rollout import Roles
from ratchet.adapters.places.place import Place
from ratchet.adapters.process.program import (
    NoCommand,
    Program,
    program_environment,
    split_words,
    start_program,
)
from ratchet.adapters.programs.commands import answer_of, started
from ratchet.adapters.programs.residents import LastingCommand, lasting_program, on_lasting_loop

SERVER, CLIENT = (Path(__file__).with_name(f"fork_{end}.py") for end in ("server", "client"))

SERVERS_HOME = ".server"
"""Folder beside the places that is HOME and TMPDIR of a server."""

ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
"""Variables of a server, so that no library for numbers starts threads as it is imported."""

MOST_SERVERS = 4
"""Servers of a program that may end; after them it is no more forked."""

INTERPRETER = re.compile(r"(python|pypy)[\d.]*")
"""Name of an interpreter of Python."""

IMPORTED = re.compile(r"^(?:from|import) +(\w+)", re.M)

OPTION = re.compile(r"-(?![A-Za-z]*[mc])[A-Za-z]+")
WITH_A_WORD = ("-W", "-X")
"""Options of an interpreter, and those that take a word."""

log = logging.getLogger(__name__)


def forks(line: str) -> Callable[..., Coroutine[None, None, object]]:
    """Return the agent that plays a rollout in a fork of a server that has the program's imports.

    The words are a console script's, or an interpreter's with a script or with `-m` and a module.
    Environment, place, reward and errors are as for `command`.
    """
    interpreter, program, own = _read_line(line, split_words("forks", line))

    async def play(
        example: Example, *, roles: Roles, place: Place | None = None, **_: str
    ) -> object:
        shared = {**program_environment(), **ONE_THREAD}
        if place is not None:  # no library reads the user's HOME, and nothing is filled in
            folder = Path(place.settings.folder) / SERVERS_HOME
            folder.mkdir(parents=True, exist_ok=True)
            given = place.settings.variables.items()
            shared |= {"HOME": str(folder), "TMPDIR": str(folder)}
            shared |= {name: value for name, value in given if "${" not in value}
        serving = (*interpreter, str(SERVER), *own)
        command = LastingCommand(line, serving, Path.cwd(), (*shared.items(),))
        words, inherited = [*interpreter, *program], list[int]()
        server = await on_lasting_loop(_server(command))
        if server is not None:
            inherited = [server.channel]
            numbers = map(str, (server.channel, len(interpreter)))
            words = [sys.executable, "-IS", str(CLIENT), *numbers, *words]
        async with started(words, example, roles, place, inherited) as played:
            try:
                await played.silent.wait()
            finally:
                if not played.exited.is_set():
                    played.kill()
                    await played.silent.wait()  # its fork ends after it
        return await answer_of(played, line, roles, place)

    return play


class _ForkServer(Program):
    """A process that has a program's imports, and forks for whoever has its channel."""

    def __init__(self, channel: int) -> None:
        super().__init__()
        self.channel = channel
        finalize(self, os.close, channel)


async def _start(command: LastingCommand) -> _ForkServer:
    ours, theirs = socket.socketpair()
    channel = ours.detach()
    with theirs:
        server = await start_program(
            lambda: _ForkServer(channel),
            [*command.words, str(theirs.fileno())],
            dict(command.variables),
            inherited=(theirs.fileno(),),
        )
    _started.setdefault(command, []).append(server)
    return server


_started: dict[LastingCommand, list[_ForkServer]] = {}


async def _server(command: LastingCommand) -> _ForkServer | None:
    """Return the server of a program; None if that cannot be forked."""
    before = _started.get(command, [])
    if before and before[-1].exited.is_set():
        reason = "".join(map(str, before[-1].stdout.last_json()))
        if not reason and len(before) >= MOST_SERVERS:
            reason = f"the server that does {before[-1].end()}, as {MOST_SERVERS - 1} others did"
        if reason:
            _warn(command.line, reason)
            return None
    return await lasting_program(command, _start)


@cache
def _warn(line: str, reason: str) -> None:
    log.warning(
        "the program of 'forks:%s' cannot be forked once its libraries are imported: %s; it plays "
        "as command: has it play, so write command: in place of forks:",
        line,
        reason,
    )


def _read_line(line: str, words: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Take the words of a command line apart; NoCommand if they run no program in Python.

    They are its interpreter's, the program's, and the packages that each rollout imports for
    itself.
    """
    first, count = str(Path(shutil.which(words[0]) or words[0]).absolute()), 1
    if not INTERPRETER.fullmatch(Path(first).name):
        return _of_script(line, first, words[1:])
    while count < len(words) and OPTION.fullmatch(words[count]):
        count += 2 if words[count] in WITH_A_WORD else 1
    program = [*words[count:]]
    module = program[1] if program[:1] == ["-m"] and program[1:] else None
    if not program or (program[0].startswith("-") and module is None):
        raise NoCommand(
            f"the agent 'forks:{line}' names no program after its interpreter and the options of "
            "that; write forks:PYTHON -m MODULE, or forks:PYTHON SCRIPT"
        )
    return [first, *words[1:count]], program, [module.partition(".")[0]] if module else []


def _of_script(
    line: str, script: str, words: Sequence[str]
) -> tuple[list[str], list[str], list[str]]:
    """Read the interpreter of a script, which may follow `env`, and the packages it imports."""
    with Path(script).open("rb") as file:
        text = file.read().decode(errors="replace") if file.read(2) == b"#!" else ""
    named = deque(shlex.split(text.partition("\n")[0]))
    while named and not INTERPRETER.fullmatch(Path(named[0]).name):
        named.popleft()
    python = shutil.which(named[0]) if named else None
    if python is None:
        raise NoCommand(
            f"{script} begins with no line that names an interpreter of Python, and the agent "
            f"'forks:{line}' is a program in Python; write forks:PYTHON -m MODULE, or command:"
        )
    interpreter = [str(Path(python).absolute()), *[*named][1:]]
    return interpreter, [script, *words], IMPORTED.findall(text)
