"""Programs as child processes, and agents that are such programs: commands and resident programs.

A command runs once for each rollout: the example on stdin, the reward on stdout. A resident program
is started for the first rollout that a process plays, and then plays all of them. It reads
{id: …, example: …, roles: …} and writes {id: …, reward: …} or {id: …, error: …}, for
several rollouts at once and in any order.
"""

import asyncio
import atexit
import json
import os
import re
import shlex
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from threading import Lock, Thread
from types import MappingProxyType
from typing import TypeVar

from adapters.calls import Example, JsonObject
from adapters.clients.current_rollout import Roles
from adapters.errors import UserError
from adapters.process.child import end_with_this_process, has_ended
from adapters.process.event_loop import RunningLoop
from adapters.process.open_files import users_limit
from adapters.process.running_clock import Wait

PASSED_VARIABLES = re.compile(
    "PATH|HOME|USER|LANG|LC_.+|TZ|TMPDIR|VIRTUAL_ENV|PYTHONPATH|NODE_PATH|"
    "SSL_CERT_(FILE|DIR)|NODE_EXTRA_CA_CERTS|(REQUESTS|CURL)_CA_BUNDLE|NO_PROXY|no_proxy"
)
"""The environment variables that a program gets: programs need them to start, and they hold no
secrets."""

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


class NoCommand(UserError):
    """An error for a command line that cannot be run as an agent."""


class CommandFailed(RuntimeError):
    """An error for a program that gave no reward."""


def split_words(kind: str, line: str) -> list[str]:
    """Split the command line of the agent `kind:line`, like a shell; NoCommand if it cannot run."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise NoCommand(f"the command {line!r} cannot be read ({error}); quote it") from error
    if not words:
        raise NoCommand(f"the agent '{kind}:' names no program; write one, as in {kind}:node x.js")
    if shutil.which(words[0]) is None:
        raise NoCommand(
            f"there is no program {words[0]!r} to run as the agent '{kind}:{line}'; install it, "
            "or write its path"
        )
    return words


def program_environment() -> dict[str, str]:
    """Return the part of this process's environment that a program gets."""
    passed = {name: value for name, value in os.environ.items() if PASSED_VARIABLES.fullmatch(name)}
    return {**passed, **MORE_VARIABLES.get()}


def mask(text: str, secrets: Collection[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, "***")
    return text


class Program(asyncio.SubprocessProtocol):
    """A running program, what it writes and when it ends, as asyncio reports them.

    asyncio's own `Process.wait` would also wait for any process that keeps the program's stdout
    open, such as a browser in a session of its own, since such a browser is not killed with the
    program.
    """

    def __init__(self) -> None:
        self.spoken = asyncio.Event()
        """Set when the program has written something, or has ended."""
        self.exited = asyncio.Event()
        self.silent = asyncio.Event()
        """Set when the program has ended and all that it wrote has been read."""
        self.status: int | None = None
        self.stdout = StreamEnd("stdout")
        self.stderr = StreamEnd("stderr")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._transport = transport
        stdin = transport.get_pipe_transport(0)
        assert isinstance(stdin, asyncio.WriteTransport)
        self.stdin = stdin
        end_with_this_process(-transport.get_pid())
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
        has_ended(-self._transport.get_pid())
        self.exited.set()
        asyncio.get_running_loop().call_later(DRAIN_SECONDS, self._transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self.spoken.set()
        self.silent.set()

    def kill(self) -> None:
        """Kill the program's process group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._transport.get_pid(), signal.SIGKILL)

    async def stop(self) -> None:
        """Kill what is left of the program, and wait for its end."""
        if not self.exited.is_set():
            self.kill()
            await self.exited.wait()
        self._transport.close()

    def end(self) -> str:
        if self.status is not None and self.status < 0:
            return f"was ended by signal {-self.status}"
        return f"ended with exit status {self.status}"


ProgramT = TypeVar("ProgramT", bound=Program)


async def start_program(
    program: Callable[[], ProgramT], words: Sequence[str], variables: Mapping[str, str]
) -> ProgramT:
    """Start a program in a process group of its own; whoever starts it must `stop` it."""
    loop = asyncio.get_running_loop()
    gated = (*GATE, users_limit(), *words)
    _, started = await loop.subprocess_exec(program, *gated, env=variables, start_new_session=True)
    return started


@asynccontextmanager
async def running_program(
    words: Sequence[str], variables: Mapping[str, str], line: str
) -> AsyncIterator[Program]:
    """Start a program with `line` on its stdin; its whole process group ends with the block."""
    program = await start_program(Program, words, variables)
    try:
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

    def quote(self, secrets: Collection[str]) -> str:
        """Quote the last characters, without `secrets`, as a sentence after another."""
        text = mask(self._kept.decode(errors="replace"), secrets)[-QUOTED_CHARACTERS:].strip()
        return f". The end of its {self._stream}:\n{text or '(nothing)'}"


def command(line: str) -> Callable[..., Coroutine[None, None, object]]:
    """Return the agent that runs the command `line`, split like a shell's but run without a shell.

    It runs in the current directory. Its environment has OPENAI_BASE_URL, OPENAI_API_KEY and
    OPENAI_MODEL for its own role, and <ROLE>_BASE_URL and so on for every other. The reward is
    the last line of its stdout that is JSON. When it ends or is cancelled, its whole process group
    is killed.
    """
    words = split_words("command", line)

    async def play(example: Example, *, roles: Roles, **_: str) -> object:
        async with running_program(words, _environment(roles), json.dumps(example)) as program:
            await program.silent.wait()
        if program.status == 0 and (found := program.stdout.last_json()):
            return found[0]
        keys = [of_role["api_key"] for of_role in roles.values()]
        raise CommandFailed(f"the command {line!r} {_failure(program, keys)}")

    return play


def _environment(roles: Roles) -> dict[str, str]:
    variables = program_environment()
    for number, (role, of_role) in enumerate(roles.items()):
        prefix = "OPENAI" if number == 0 else re.sub(r"\W", "_", role).upper()
        variables |= {f"{prefix}_{name.upper()}": str(value) for name, value in of_role.items()}
    return variables


def _failure(program: Program, secrets: Sequence[str]) -> str:
    """Describe why a program that has ended gave no reward."""
    if program.status == 0:
        fact = "printed no reward; its last line must be a JSON number, or object of roles"
    elif program.status is not None and program.status < 0:
        fact = f"{program.end()}; see why, and run it by hand"
    else:
        fact = f"{program.end()}; it must end with 0"
    return fact + program.stdout.quote(secrets) + program.stderr.quote(secrets)


LONGEST_LINE = 16 * 2**20
"""Bytes of an answer. A longer line ends its program, since nobody knows whose answer it is."""

CANCEL_SECONDS = 10.0
"""Time in which a program must answer a rollout that was cancelled; later it is held to hang."""

END_LOOK_SECONDS = 0.1
"""Time between two looks for that answer."""


def resident(line: str) -> Callable[..., Coroutine[None, None, object]]:
    """Return the agent that the resident program of the command `line` plays.

    The words and the environment are as for `command`, without the variables of the roles. The
    agents of this process that have the same line, folder and environment share one program.
    """
    words = split_words("resident", line)

    async def play(example: Example, *, roles: Roles, **_: str) -> object:
        command = ResidentCommand(line, (*words,), Path.cwd(), (*program_environment().items(),))
        playing = asyncio.run_coroutine_threadsafe(_play(command, example, roles), _loop())
        return await asyncio.wrap_future(playing)

    return play


@dataclass(frozen=True)
class ResidentCommand:
    """A resident program's command line, folder and environment; equal commands share a program."""

    line: str
    words: tuple[str, ...]
    folder: Path
    variables: tuple[tuple[str, str], ...]


@cache
def _start_loop() -> asyncio.AbstractEventLoop:
    loop = RunningLoop()
    Thread(target=loop.run_forever, name="resident programs", daemon=True).start()
    return loop


_starting_loop = Lock()


def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of the resident programs, which outlives the loops of batches."""
    with _starting_loop:  # several batches begin at once, each in a thread
        return _start_loop()


async def _play(command: ResidentCommand, example: Example, roles: Roles) -> object:
    process = await _running_process(command)
    said = await process.ask(example, roles)
    if "reward" in said:
        return said["reward"]
    keys = [of_role["api_key"] for of_role in roles.values()]
    fact = mask(str(said.get("error", "the answer has neither 'reward' nor 'error'")), keys)
    raise CommandFailed(f"{fact}: the program {command.line!r} failed to play the example")


_processes: dict[ResidentCommand, "_Process"] = {}
_starting = asyncio.Lock()


async def _running_process(command: ResidentCommand) -> "_Process":
    """Return the process of a resident program; start a program if it does not run."""
    async with _starting:
        process = _processes.get(command)
        if process is None or process.exited.is_set():
            process = await start_program(
                lambda: _Process(command.line), command.words, dict(command.variables)
            )
            _processes[command] = process
    return process


@atexit.register
def kill_programs() -> None:
    for process in _processes.values():
        if not process.exited.is_set():
            process.kill()


class _Process(Program):
    """A process of a resident program, and the rollouts that it has not answered."""

    def __init__(self, line: str) -> None:
        super().__init__()
        self._line = line
        self._numbers = count(1)
        self._unanswered: dict[int, asyncio.Future[JsonObject]] = {}
        self._keys: set[str] = set()
        self._looking: set[asyncio.Task[None]] = set()
        self._reason = ""
        self._partial_line = bytearray()
        """The beginning of a line on stdout whose end has not arrived."""

    async def ask(self, example: Example, roles: Roles) -> JsonObject:
        """Send a rollout, and wait for its answer; CommandFailed if the process ends first.

        A rollout that is cancelled is announced with {"id": …, "cancelled": true}.
        """
        number = next(self._numbers)
        self._keys |= {of_role["api_key"] for of_role in roles.values()}
        answer = self._unanswered[number] = asyncio.get_running_loop().create_future()
        self._write({"id": number, "example": example, "roles": roles})
        try:
            return await answer
        except asyncio.CancelledError:
            if number in self._unanswered:
                self._write({"id": number, "cancelled": True})
                look = asyncio.create_task(self._kill_unless_answered(number))
                self._looking.add(look)
                look.add_done_callback(self._looking.discard)
            raise

    def _write(self, request: Mapping[str, object]) -> None:
        self.stdin.write(json.dumps(request).encode() + b"\n")

    async def _kill_unless_answered(self, number: int) -> None:
        waiting = Wait("the answer to a rollout that was cancelled", CANCEL_SECONDS)
        while number in self._unanswered and not self.exited.is_set():
            if waiting.over:
                self._kill(f"it had not answered a cancelled one in {CANCEL_SECONDS:g} s")
                return
            await asyncio.sleep(END_LOOK_SECONDS)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        super().pipe_data_received(fd, data)
        if fd == 1:
            self._partial_line += data
            whole = b"\n" in data
            lines = self._partial_line.split(b"\n") if whole else [self._partial_line]
            if any(len(line) > LONGEST_LINE for line in lines):
                self._kill(f"it wrote a line of more than {LONGEST_LINE} bytes")
            *answers, self._partial_line = lines
            for line in answers:
                self._read(line)

    def _kill(self, reason: str) -> None:
        self._reason = f", since {reason}"
        self.kill()

    def _read(self, line: bytearray) -> None:
        """Give an answer to the rollout that it names; any other line is ignored."""
        with suppress(ValueError, RecursionError):
            said = json.loads(line)
            number = said.get("id") if isinstance(said, dict) else None
            if type(number) is int and number in self._unanswered:
                answer = self._unanswered.pop(number)
                if not answer.done():
                    answer.set_result(said)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._transport.close()
        stderr = self.stderr.quote(self._keys)
        fact = f"the program {self._line!r} {self.end()} while it played{self._reason}{stderr}"
        for answer in self._unanswered.values():
            if not answer.done():
                answer.set_exception(CommandFailed(fact))
        self._unanswered.clear()
