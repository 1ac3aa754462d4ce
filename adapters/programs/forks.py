"""Agents that are programs in Python, whose libraries are imported once, and forked for a rollout.

A rollout's process is that of a `command`, but asks a fork server in the program's interpreter to
run the program; see `fork_server.py`.
"""

import re
import shlex
import shutil
import socket
import sys
from collections import defaultdict
from collections.abc import Callable, Coroutine
from itertools import dropwhile
from pathlib import Path

from ratchet.adapters.calls import Example
from ratchet.adapters.clients.current_rollout import Roles
from ratchet.adapters.errors import UserError
from ratchet.adapters.places.place import Place
from ratchet.adapters.process.event_loop import on_lasting_loop
from ratchet.adapters.process.program import (
    Program,
    program_environment,
    split_words,
    start_program,
)
from ratchet.adapters.programs.commands import answer_of, started, warn_once
from ratchet.adapters.programs.residents import LastingCommand, lasting_program

SERVER, CLIENT = (Path(__file__).with_name(f"fork_{end}.py") for end in ("server", "client"))

ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
"""Variables of a server, so that no library for numbers starts threads as it is imported."""

MOST_SERVERS = 4

INTERPRETER = re.compile(r"(python|pypy)[\d.]*")
"""Name of an interpreter of Python."""

IMPORTED = re.compile(r"^(?:from|import) +(\w+)", re.M)

WITH_A_WORD = ("-W", "-X")
"""Options of an interpreter that take a word."""


def forks(line: str) -> Callable[..., Coroutine[None, None, object]]:
    """Return the agent that plays a rollout in a fork of a server that has the program's imports.

    The words are a console script's, or an interpreter's with a script or with `-m` and a module.
    Environment, place, reward and errors are as for `command`.
    """
    interpreter, program, own = _read_line(line)

    async def play(
        example: Example, *, roles: Roles, place: Place | None = None, **_: str
    ) -> object:
        shared = {**program_environment(), **ONE_THREAD}
        if place is not None:  # no library reads the user's HOME, and nothing is filled in
            folder = Path(place.settings.folder) / ".server"
            folder.mkdir(parents=True, exist_ok=True)
            shared |= {"HOME": str(folder), "TMPDIR": str(folder)}
            shared |= {n: v for n, v in place.settings.variables.items() if "${" not in v}
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

    channel = -1


_servers = defaultdict[LastingCommand, list[_ForkServer]](list)
"""The servers that each program has had, MOST_SERVERS at most."""


async def _start(command: LastingCommand) -> _ForkServer:
    ours, theirs = socket.socketpair()
    with theirs:
        number = theirs.fileno()
        words, variables = [*command.words, str(number)], dict(command.variables)
        server = await start_program(_ForkServer, words, variables, inherited=(number,))
    server.channel = ours.detach()
    _servers[command].append(server)
    return server


async def _server(command: LastingCommand) -> _ForkServer | None:
    """Return the server of a program; None if that cannot be forked, or ends its servers."""
    if (before := _servers[command]) and before[-1].exited.is_set():
        reason = "".join(map(str, before[-1].stdout.last_json()))
        if reason or len(before) == MOST_SERVERS:
            reason = reason or f"the server that does {before[-1].end()}"
            warn_once(
                f"the program of 'forks:{command.line}' cannot be forked once its libraries are "
                f"imported: {reason}; it plays as by command:, so write command: in its place"
            )
            return None
    return await lasting_program(command, _start)


def _read_line(line: str) -> tuple[list[str], list[str], list[str]]:
    """Take a command line apart; UserError if it runs no program in Python.

    Its parts are the interpreter's words, the program's, and the packages of each rollout.
    """
    words = split_words("forks", line)
    script, text = Path(shutil.which(words[0]) or words[0]).absolute(), ""
    if not INTERPRETER.fullmatch(script.name):
        text = script.read_text(encoding="utf-8", errors="replace")
        shebang = text.partition("\n")[0] if text.startswith("#!") else ""
        words = [*shlex.split(shebang.removeprefix("#!")), str(script), *words[1:]]
        words = [*dropwhile(lambda word: not INTERPRETER.fullmatch(Path(word).name), words)]
    count = 1
    while count < len(words) and words[count].startswith("-") and words[count] != "-m":
        count += 2 if words[count] in WITH_A_WORD else 1
    python, program = shutil.which(words[0]) if words else None, words[count:]
    if python is None or not program or program == ["-m"]:
        raise UserError(
            f"the agent 'forks:{line}' names no program in Python; write forks:PYTHON -m MODULE, "
            "forks:PYTHON SCRIPT, or a script whose first line names its interpreter"
        )
    own = [program[1].partition(".")[0]] if program[0] == "-m" else IMPORTED.findall(text)
    return [str(Path(python).absolute()), *words[1:count]], program, own
