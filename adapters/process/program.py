"""Programs as child processes of an event loop: their words, their environment, and their end."""

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import TypeVar

from ratchet.adapters.errors import UserError
from ratchet.adapters.process.child import end_with_this_process, has_ended, tell_status
from ratchet.adapters.process.open_files import users_limit

PASSED_VARIABLES = re.compile(
    "PATH|HOME|USER|LANG|LC_.+|TZ|TMPDIR|VIRTUAL_ENV|PYTHONPATH|NODE_PATH|"
    "SSL_CERT_(FILE|DIR)|NODE_EXTRA_CA_CERTS|(REQUESTS|CURL)_CA_BUNDLE|NO_PROXY|no_proxy"
)
"""The variables that a program gets: it needs them to start, and they hold no secrets."""

LAUNCHER = re.compile(r"(^|/)(python[\d.]*|node|deno|bun|npx|ruby|perl|env|(ba|da|z)?sh)$")
"""Programs that run another one, which a command line names after them."""

LONGEST_OUTPUT = 64 * 1024
"""The number of bytes that are kept of the end of a program's stdout, and of its stderr."""

DRAIN_SECONDS = 2.0
"""Time to read what a program wrote before its end: another process may keep it open."""

GATE = ("/bin/sh", "-c", 'ulimit -S -n "$0"; read -r _ && exec "$@"')
"""Words before the limit of a program's open files and its own words: it starts once its stdin has
a line, and never if that ends before."""

QUOTED_CHARACTERS = 2000
"""The number of characters at the end of a stream that an error shows."""


MORE_VARIABLES: ContextVar[Mapping[str, str]] = ContextVar(
    "more variables", default=MappingProxyType({})
)
"""Further variables of the programs that are started in a context."""


class CommandFailed(RuntimeError):
    """An error for a program that gave no reward."""


def split_words(kind: str, line: str) -> list[str]:
    """Split the command line of the agent `kind:line`, like a shell; UserError if it cannot run."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise UserError(f"the command {line!r} cannot be read ({error}); quote it") from error
    if not words:
        raise UserError(f"the agent '{kind}:' names no program; write one, as in {kind}:node x.js")
    if shutil.which(words[0]) is None:
        raise UserError(
            f"there is no program {words[0]!r} to run as the agent '{kind}:{line}'; install it, "
            "or write its path"
        )
    return words


def name_program(line: str) -> str:
    """Name the program of a command line in a word: of `python agents/x.py --fast`, x.

    An interpreter is passed over with its options, as is what holds a variable.
    """
    words = [word for word in re.split(r"[\s'\"]+", line) if word and "$" not in word]
    programs = [word for word in words if word[0] not in "-=" and not LAUNCHER.search(word)]
    return PurePath((programs or words or [line])[0]).stem


def project_files(line: str) -> dict[str, list[Path]]:
    """Map words of a command line that name files of the project to these."""
    words, here = re.split(r"[\s'\"=]+", line), Path.cwd()
    found = {word: Path(word.removeprefix("${PROJECT}/")) for word in words}
    own = {word: path for word, path in found.items() if path.is_file()}
    return {word: [p] for word, p in own.items() if p.resolve().is_relative_to(here)}


def program_environment() -> dict[str, str]:
    """Return the part of this process's environment that a program gets."""
    passed = {name: value for name, value in os.environ.items() if PASSED_VARIABLES.fullmatch(name)}
    return {**passed, **MORE_VARIABLES.get()}


def mask(text: str, secrets: Collection[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, "***")
    return text


class Program(asyncio.SubprocessProtocol):
    """A program that is a child process of this one, what it writes and when it ends.

    asyncio's own `Process.wait` would also wait for any process that keeps the program's stdout
    open, such as a browser in a session of its own, which is not killed with it.
    """

    def __init__(self) -> None:
        self.spoken = asyncio.Event()
        """Set when the program has written something, or has ended."""
        self.exited = asyncio.Event()
        self.silent = asyncio.Event()
        """Set when the program has ended and all that it wrote has been read."""
        self.status: int | None = None
        self.began = True
        """False if the program of a place has ended since the system could not start it."""
        self.stdout = StreamEnd("stdout")
        self.stderr = StreamEnd("stderr")

    def kill(self) -> None:
        """Kill the program's process group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def said(self, secrets: Collection[str]) -> str:
        """Return how the program ended and the end of what it wrote, without `secrets`."""
        return f"{self.end()}{self.stdout.quote(secrets)}{self.stderr.quote(secrets)}\n"

    def end(self) -> str:
        return "has not ended" if self.status is None else tell_status(self.status)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._transport = transport
        self.pid = transport.get_pid()
        stdin = transport.get_pipe_transport(0)
        assert isinstance(stdin, asyncio.WriteTransport)
        self.stdin = stdin
        end_with_this_process(-self.pid)
        stdin.write(b"\n")  # the program starts, now that it cannot outlive this process

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == 1:
            self.stdout.add(data)
            self.spoken.set()
        else:
            self.stderr.add(data)

    def process_exited(self) -> None:
        self.status = self._transport.get_returncode()
        self.kill()
        has_ended(-self.pid)
        self.exited.set()
        asyncio.get_running_loop().call_later(DRAIN_SECONDS, self._transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self.spoken.set()
        self.silent.set()

    async def stop(self) -> None:
        """Kill what is left of the program, and wait for its end."""
        if not self.exited.is_set():
            self.kill()
            await self.exited.wait()
        self._transport.close()


ProgramT = TypeVar("ProgramT", bound=Program)


async def start_program(
    program: Callable[[], ProgramT],
    words: Sequence[str],
    variables: Mapping[str, str],
    folder: Path | None = None,
    inherited: Collection[int] = (),
) -> ProgramT:
    """Start a program in a process group of its own; whoever starts it must `stop` it.

    It begins in `folder`, or else in this process's, and inherits the descriptors `inherited`.
    """
    loop = asyncio.get_running_loop()
    gated = (*GATE, users_limit(), *words)
    options = {"env": variables, "cwd": folder, "pass_fds": inherited, "start_new_session": True}
    _, started = await loop.subprocess_exec(program, *gated, **options)
    return started


@asynccontextmanager
async def running_program(
    words: Sequence[str],
    variables: Mapping[str, str],
    line: str,
    *,
    folder: Path | None = None,
    inherited: Collection[int] = (),
) -> AsyncIterator[Program]:
    """Start a program with `line` on its stdin, or with nothing there if it is empty.

    The program's whole process group ends with the block.
    """
    program = await start_program(Program, words, variables, folder, inherited)
    try:
        if line:
            program.stdin.write(line.encode() + b"\n")
        program.stdin.close()
        yield program
    finally:
        await program.stop()


class StreamEnd:
    """The end of what a program writes to a stream, however long that is."""

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self._kept = bytearray()
        self._cut = False

    def add(self, data: bytes) -> None:
        self._kept += data
        if len(self._kept) > LONGEST_OUTPUT:
            del self._kept[:-LONGEST_OUTPUT]
            self._cut = True

    def last_json(self) -> list[object]:
        """Parse the last line that is JSON; the list is empty without such a line. A line whose
        beginning was cut off does not count: the rest of a number is another number.
        """
        for line in reversed(self._kept.decode(errors="replace").split("\n")[self._cut :]):
            with suppress(ValueError):
                return [json.loads(line)]
        return []

    def last_line_json(self) -> object:
        """Parse the last line that is not blank; None if it is no JSON, or was cut off."""
        lines = self._kept.decode(errors="replace").split("\n")[self._cut :]
        with suppress(ValueError, StopIteration):
            return json.loads(next(line for line in reversed(lines) if line.strip()))
        return None

    def quote(self, secrets: Collection[str]) -> str:
        """Quote the last characters, without `secrets`, as a sentence after another."""
        text = mask(self._kept.decode(errors="replace"), secrets)[-QUOTED_CHARACTERS:].strip()
        return f". The end of its {self._stream}:\n{text or '(nothing)'}"
