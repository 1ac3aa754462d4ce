"""Agents that are command lines: the example on stdin, the reward on stdout."""

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Literal

from adapters.calls import POLICY, Example
from adapters.errors import UserError

PASSED_ON = re.compile(
    "PATH|HOME|USER|LANG|LC_.+|TZ|TMPDIR|VIRTUAL_ENV|PYTHONPATH|NODE_PATH|"
    "SSL_CERT_(FILE|DIR)|NODE_EXTRA_CA_CERTS|(REQUESTS|CURL)_CA_BUNDLE"
)
"""The environment variables that a command gets: those that programs need to start, no secrets."""

LONGEST_OUTPUT = 64 * 1024
"""The number of bytes that are kept of the end of a command's stdout, and of its stderr."""

SHOWN = 2000
"""The number of characters of them that an error shows."""


class NoCommand(UserError):
    """An error for a command that cannot be run as an agent."""


class CommandFailed(RuntimeError):
    """An error for a command that ended without a reward."""


STREAMS: Mapping[Literal["stdout", "stderr"], int] = {"stdout": 1, "stderr": 2}


def command(line: str) -> Callable[..., Coroutine[None, None, object]]:
    """Return the agent that runs the command `line`, split like a shell's but run without a shell.

    It runs in the current directory. Its environment has OPENAI_BASE_URL, OPENAI_API_KEY and
    OPENAI_MODEL for the policy, and <ROLE>_BASE_URL and so on for every other role. The reward is
    the last line of its stdout that is JSON. When it ends or is cancelled, its whole process group
    is killed.
    """
    words = _split(line)

    async def play(example: Example, *, roles: Roles, **_: str) -> object:
        async with running_program(words, _environment(roles), json.dumps(example)) as program:
            await program.silent.wait()
        if program.status == 0 and (found := program.last_json()):
            return found[0]
        keys = [of_role["api_key"] for of_role in roles.values()]
        raise CommandFailed(f"the command {line!r} {program.failure(keys)}")

    return play


Roles = Mapping[str, Mapping[str, str]]
"""role → its base_url, api_key and model."""


def _split(line: str) -> list[str]:
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise NoCommand(f"the command {line!r} cannot be read ({error}); quote it") from error
    if not words:
        raise NoCommand("the agent 'command:' names no program; write one, as in command:node x.js")
    if shutil.which(words[0]) is None:
        raise NoCommand(
            f"there is no program {words[0]!r} to run as the agent 'command:{line}'; install it, "
            "or write its path"
        )
    return words


def _environment(roles: Roles) -> dict[str, str]:
    variables = {name: value for name, value in os.environ.items() if PASSED_ON.fullmatch(name)}
    for role, of_role in roles.items():
        prefix = "OPENAI" if role == POLICY else re.sub(r"\W", "_", role).upper()
        variables |= {f"{prefix}_{name.upper()}": value for name, value in of_role.items()}
    return variables


@asynccontextmanager
async def running_program(
    words: Sequence[str], variables: Mapping[str, str], line: str
) -> AsyncIterator["Program"]:
    """Start a program with `line` on its stdin; its whole process group ends with the block."""
    loop = asyncio.get_running_loop()
    transport, program = await loop.subprocess_exec(
        Program, *words, env=variables, start_new_session=True
    )
    try:
        stdin = transport.get_pipe_transport(0)
        assert isinstance(stdin, asyncio.WriteTransport)
        stdin.write(line.encode() + b"\n")
        stdin.close()
        yield program
    finally:
        if not program.exited.is_set():
            program.kill()
            await program.exited.wait()
        transport.close()


class Program(asyncio.SubprocessProtocol):
    """A running program, what it writes and when it ends, as asyncio reports them.

    asyncio's own `Process.wait` would also wait for any child of the program that keeps the
    program's stdout open.
    """

    def __init__(self) -> None:
        self.spoken = asyncio.Event()
        """Set when the program has written something, or has ended."""
        self.exited = asyncio.Event()
        self.silent = asyncio.Event()
        """Set when the program has ended and all that it wrote has been read."""
        self.status: int | None = None
        self._written = {1: _Tail(), 2: _Tail()}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._transport = transport

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._written[fd].add(data)
        if fd == 1:
            self.spoken.set()

    def process_exited(self) -> None:
        self.status = self._transport.get_returncode()
        self.kill()
        self.exited.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.spoken.set()
        self.silent.set()

    def kill(self) -> None:
        """Kill the program's process group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._transport.get_pid(), signal.SIGKILL)

    def last_json(self) -> list[object]:
        """Parse the last line on stdout that is JSON; the list is empty if none is."""
        for line in reversed(self._written[1].lines()):
            with suppress(ValueError):
                return [json.loads(line)]
        return []

    def failure(self, secrets: Sequence[str]) -> str:
        """Describe what went wrong, with the end of the program's output, without `secrets`."""
        if self.status == 0:
            fact = "printed no reward; its last line must be a JSON number, or object of roles"
        elif self.status is not None and self.status < 0:
            fact = f"{self.end()}; see why, and run it by hand"
        else:
            fact = f"{self.end()}; it must end with 0"
        return fact + "".join(self.output(of, secrets) for of in STREAMS)

    def end(self) -> str:
        """Describe how the process ended."""
        if self.status is not None and self.status < 0:
            return f"was ended by signal {-self.status}"
        return f"ended with exit status {self.status}"

    def output(self, stream: Literal["stdout", "stderr"], secrets: Sequence[str]) -> str:
        """Quote the end of what the program wrote to a stream, without `secrets`."""
        written = self._written[STREAMS[stream]].end(secrets)
        return f". The end of its {stream}:\n{written}"


class _Tail:
    """The end of a stream, however long the stream is."""

    def __init__(self) -> None:
        self._kept = bytearray()
        self._cut = False

    def add(self, data: bytes) -> None:
        self._kept += data
        if len(self._kept) > LONGEST_OUTPUT:
            del self._kept[:-LONGEST_OUTPUT]
            self._cut = True

    def lines(self) -> list[str]:
        """Return whole lines only, since the rest of a number that was cut is another number."""
        return self._kept.decode(errors="replace").split("\n")[self._cut :]

    def end(self, secrets: Sequence[str]) -> str:
        text = self._kept.decode(errors="replace")
        for secret in secrets:
            text = text.replace(secret, "***")
        return text[-SHOWN:].strip() or "(nothing)"
