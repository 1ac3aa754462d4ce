"""Agents that are programs in Python, whose libraries are imported once, and forked for a rollout.

A fork server in the program's interpreter imports what the first rollout's program has imported. A
fork outlives its server: the death of a server costs no rollout.
"""

import asyncio
import json
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from io import FileIO
from itertools import takewhile
from pathlib import Path
from signal import SIGKILL
from threading import Lock

from adapters.calls import Example, JsonObject
from adapters.clients.current_rollout import Roles, role_variables
from adapters.places.place import Place
from adapters.places.running import bounded
from adapters.process.child import end_with_this_process, has_ended
from adapters.process.program import (
    DRAIN_SECONDS,
    CommandFailed,
    Program,
    program_environment,
    split_words,
    start_program,
)
from adapters.programs.commands import answer_of, told
from adapters.programs.fork_server import BY_MODULE
from adapters.programs.lasting import (
    LONGEST_LINE,
    AnsweringProgram,
    LastingCommand,
    LastingPrograms,
    lasting_loop,
)
from adapters.programs.python_lines import PythonLine, read_python_line

SERVER = Path(__file__).with_name("fork_server.py")

SERVERS_HOME = ".server"

ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
"""Variables of a server, so that no library for numbers starts threads as it is imported."""

LEARN_SECONDS = 10.0
"""Time for which the others wait for the end of a server's first rollout, whose imports are the
server's. Later they begin with what is known."""

IMPORT_SECONDS = 120.0
"""Time in which a server must have imported what it was told to."""

THREAD_SECONDS = 15.0
"""Time in which a thread that an import has started may end, such as one that asks for a file."""

MOST_DEATHS = 2
"""Servers that may die as they import, before no further one imports anything."""

MOST_SERVERS = 4
"""Servers that a rollout asks, one after another died, before it fails."""

FORKS_AT_A_TIME = 16
"""Forks that a server is asked for at a time: their streams are in flight."""

log = logging.getLogger(__name__)


def forks(line: str) -> Callable[..., Coroutine[None, None, object]]:
    """Return the agent that plays a rollout in a fork of a server that has the program's imports.

    The words are a console script's, or an interpreter's with a script or with `-m` and a module.
    Environment, place, reward and errors are as for `command`.
    """
    python = read_python_line(line, split_words("forks", line))

    async def play(
        example: Example, *, roles: Roles, place: Place | None = None, **_: str
    ) -> object:
        async with _started(line, python, example, roles, place) as program:
            await program.silent.wait()
        return await answer_of(program, line, roles, place)

    return play


@asynccontextmanager
async def _started(
    line: str, python: PythonLine, example: Example, roles: Roles, place: Place | None
) -> AsyncIterator[Program]:
    line_told, words = json.dumps(example), python.words
    shared = {**program_environment(), **ONE_THREAD}
    variables = program_environment() | role_variables(roles)
    if place is not None:
        line_told = told(words, example)
        variables = place.variables(roles)
        words = [place.fill_in(word, variables, f"the agent's word {word!r}") for word in words]
        shared |= _of_every_rollout(place)
    name, *arguments = words
    request: JsonObject = {
        "how": python.how,
        "name": name,
        "arguments": arguments,
        "own": [*python.own, *([name.partition(".")[0]] if python.how == BY_MODULE else [])],
        "variables": variables,
        "folder": str(Path.cwd() if place is None else place.work),
        "most_bytes": None if place is None else place.settings.bounds.most_bytes,
    }
    command = LastingCommand(line, python.interpreter, Path.cwd(), (*shared.items(),))
    forked = _forked(
        command, request, line_told, [of_role["api_key"] for of_role in roles.values()]
    )
    if place is not None:
        forked = bounded(place, forked, variables["HOME"])
    async with forked as program:
        yield program


def _of_every_rollout(place: Place) -> Mapping[str, str]:
    """Return the variables of a server: those of the recipe that are filled in with nothing.

    Its HOME and TMPDIR are a folder beside the places, so that no library reads the user's.
    """
    folder = Path(place.settings.folder) / SERVERS_HOME
    folder.mkdir(parents=True, exist_ok=True)
    given = {name: value for name, value in place.settings.variables.items() if "${" not in value}
    return {"HOME": str(folder), "TMPDIR": str(folder), **given}


class _Known:
    """Modules that a program is known to import, whichever of its servers lives."""

    def __init__(self) -> None:
        self.modules: dict[str, str] = {}
        """Module → its file, in the order in which the imports began."""
        self.learned = asyncio.Event()
        """Set when the first rollout has ended, or LEARN_SECONDS are over."""
        self.deaths = 0
        """Servers that have died as they imported."""
        self._begun = False
        self._closed = False

    async def begin(self) -> None:
        """Wait for the first rollout, unless this one is."""
        if self._begun:
            await self.learned.wait()
            return
        self._begun = True
        asyncio.get_running_loop().call_later(LEARN_SECONDS, self.learned.set)

    def add(self, modules: Mapping[str, str]) -> None:
        if not self._closed:
            self.modules = {**self.modules, **modules} | self.modules

    def leave_out(self, name: str, line: str, reason: str) -> None:
        """Have every rollout import a module, and what came after it, for itself."""
        log.warning(
            "the server of 'forks:%s' does not import %s, since %s; each rollout imports it, and "
            "what it imported after it, for itself: see what the module does when it is imported",
            line,
            name,
            reason,
        )
        self.modules = dict(takewhile(lambda known: known[0] != name, self.modules.items()))
        self._closed = True


_known: dict[LastingCommand, _Known] = {}


class _Ends:
    """Pipes of a fork: our ends, and the program's, which a server gets."""

    def __init__(self) -> None:
        self._closing, self._locked = ExitStack(), Lock()
        try:
            stdin = self._pipe()
            stdout, stderr, control = self._pipe(), self._pipe(), self._pipe()
        except OSError:
            self.close()
            raise
        self.stdin, self.outputs = stdin[1], (stdout[0], stderr[0], control[0])
        self._theirs = (stdin[0], stdout[1], stderr[1], control[1])

    def _pipe(self) -> tuple[FileIO, FileIO]:
        read, write = os.pipe()
        opened = os.fdopen(read, "rb", 0), os.fdopen(write, "wb", 0)
        for end in opened:
            self._closing.enter_context(end)
        return opened

    def send(self, channel: socket.socket) -> None:
        with self._locked:  # the thread of another loop closes them if the rollout is cancelled
            if self._theirs[0].closed:
                raise asyncio.CancelledError
            socket.send_fds(channel, [b"."], [end.fileno() for end in self._theirs])

    def hand_over(self) -> None:
        """Close the program's ends, and leave ours to who reads and writes them."""
        with self._locked:
            for end in self._theirs:
                end.close()

    def close(self) -> None:
        with self._locked:
            self._closing.close()


class _ForkServer(AnsweringProgram):
    """A process that has a program's imports, and forks."""

    def __init__(self, line: str, channel: socket.socket) -> None:
        super().__init__(f"forks:{line}")
        self._agent = line
        self._channel = channel
        self._asking = asyncio.Semaphore(FORKS_AT_A_TIME)
        self._learning = asyncio.Lock()
        self._told = 0
        """Modules that it was told to import."""

    async def learn(self, known: _Known) -> None:
        """Have it import what is known by now; CommandFailed if it dies of that."""
        async with self._learning:
            modules = [*known.modules.items()][self._told :]
            if modules:
                self._told = len(known.modules)
                await self._import(modules, known)

    async def _import(self, modules: Sequence[tuple[str, str]], known: _Known) -> None:
        try:
            async with asyncio.timeout(IMPORT_SECONDS):
                said = await self.ask({"import": modules, "seconds": THREAD_SECONDS})
        except CommandFailed:
            known.deaths += 1
            if known.deaths >= MOST_DEATHS:
                reason = f"a server that imported it, or what comes after it, {self.end()}, twice"
                known.leave_out(modules[0][0], self._agent, reason)
            raise
        except TimeoutError:
            said = {"spoiled": modules[0][0], "reason": f"that takes over {IMPORT_SECONDS:g} s"}
        if "spoiled" in said:
            known.leave_out(str(said["spoiled"]), self._agent, str(said["reason"]))
            self.kill()
            raise CommandFailed(f"the server imported {said['spoiled']}, and {said['reason']}")

    async def fork(self, request: JsonObject, ends: _Ends, keys: Sequence[str]) -> None:
        """Have it fork; CommandFailed if it ends before it has, OSError if it cannot."""
        async with self._asking:
            try:
                ends.send(self._channel)
            except OSError as error:
                raise CommandFailed(f"no fork could be asked for: {error}") from error
            said = await self.ask({"fork": request}, keys)
        if "failed" in said:
            raise OSError(f"a rollout's program cannot be forked: {said['failed']}")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._channel.close()


async def _start(command: LastingCommand) -> _ForkServer:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with theirs:
        words = [*command.words, str(SERVER), str(theirs.fileno())]
        return await start_program(
            lambda: _ForkServer(command.line, ours),
            words,
            dict(command.variables),
            inherited=(theirs.fileno(),),
        )


_servers = LastingPrograms(_start)


async def _await_imports(command: LastingCommand) -> None:
    """Wait until a server has imported what is known, or has died of that."""
    known = _known[command]
    await known.begin()
    server = await _servers.running(command)
    with suppress(CommandFailed):
        await _whole(server.learn(known))


async def _fork(
    command: LastingCommand, request: JsonObject, ends: _Ends, keys: Sequence[str]
) -> None:
    """Have a server fork, and another if it dies of that or before."""
    left = MOST_SERVERS
    while left:
        left -= 1
        server = await _servers.running(command)
        try:
            await _whole(server.learn(_known[command]))
            await server.fork(request, ends, keys)
        except CommandFailed:
            server.kill()
            await server.exited.wait()
            if not left:
                raise
        else:
            return


async def _whole(work: Coroutine[None, None, None]) -> None:
    """Await work that goes on if whoever waits is cancelled, since others wait for it too."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    await asyncio.shield(task)


@asynccontextmanager
async def _forked(
    command: LastingCommand, request: JsonObject, told: str, keys: Sequence[str]
) -> AsyncIterator[Program]:
    """Have a program begin in a fork, with `told` on its stdin; the program ends with the block."""
    loop, known = lasting_loop(), _known.setdefault(command, _Known())
    program = _ForkedProgram(lambda modules: loop.call_soon_threadsafe(known.add, modules))
    try:
        await _on_loop(_await_imports(command))  # without a descriptor
        with closing(_Ends()) as ends:
            try:
                await program.connect(ends)
                await _on_loop(_fork(command, request, ends, keys))
                ends.hand_over()
                await program.ready.wait()
                program.begin(told)
                yield program
            finally:
                await program.stop()
    finally:
        loop.call_soon_threadsafe(known.learned.set)


async def _on_loop(work: Coroutine[None, None, None]) -> None:
    """Await work on the servers' loop; it is cancelled if this is."""
    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, lasting_loop()))


class _Stream(asyncio.Protocol):
    """A pipe of a fork, whose data and end it tells."""

    def __init__(self, add: Callable[[bytes], None], ended: Callable[[], None]) -> None:
        self._add, self._ended = add, ended

    def data_received(self, data: bytes) -> None:
        self._add(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended()


class _ForkedProgram(Program):
    """A program in a fork, which tells `learn` of the modules that it has imported."""

    def __init__(self, learn: Callable[[Mapping[str, str]], object]) -> None:
        super().__init__()
        self.ready = asyncio.Event()
        """Set when the fork waits to begin, or was lost."""
        self._learn = learn
        self._keeper = 0
        self._partial_line = bytearray()
        self._open = 2
        self._stdin: asyncio.WriteTransport | None = None
        self._transports: list[asyncio.BaseTransport] = []

    async def connect(self, ends: _Ends) -> None:
        loop = asyncio.get_running_loop()
        self._stdin, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, ends.stdin)
        self._transports.append(self._stdin)
        for add, ended, end in zip(
            (self.stdout.add, self.stderr.add, self._add_control),
            (self._end_stream, self._end_stream, self._end_control),
            ends.outputs,
            strict=True,
        ):
            stream = _Stream(add, ended)
            read, _ = await loop.connect_read_pipe(lambda stream=stream: stream, end)
            self._transports.append(read)

    def begin(self, told: str) -> None:
        """Have the fork begin, now that it cannot outlive this process; CommandFailed if lost."""
        if self._pid is None or self._stdin is None:
            raise CommandFailed("the fork of a rollout was killed before its program began")
        end_with_this_process(-self.pid)
        self._stdin.write(b"\n" + (told.encode() + b"\n" if told else b""))
        self._stdin.close()

    async def stop(self) -> None:
        """Kill what is left of the program, and wait for its end."""
        if self._pid is not None and not self.exited.is_set():
            self.kill()
            with suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_SECONDS):
                    await self.exited.wait()
            if not self.exited.is_set():
                with suppress(ProcessLookupError):
                    os.kill(self._keeper, SIGKILL)
        self._close()

    def _close(self) -> None:
        for transport in self._transports:
            transport.close()
        if self._stdin is not None and self._stdin.get_write_buffer_size():
            self._stdin.abort()

    def _add_control(self, data: bytes) -> None:
        self._partial_line += data
        *lines, self._partial_line = self._partial_line.split(b"\n")
        if len(self._partial_line) > LONGEST_LINE:
            self.kill()
            self._partial_line.clear()
        for line in lines:
            with suppress(ValueError, RecursionError):
                said = json.loads(line)
                if isinstance(said, dict):
                    self._hear(said)

    def _hear(self, said: JsonObject) -> None:
        match said:
            case {"program": int(pid), "keeper": int(keeper)} if self._pid is None:
                self._pid, self._keeper = pid, keeper
                self.ready.set()
            case {"modules": {**files}}:
                self._learn({name: file for name, file in files.items() if isinstance(file, str)})
            case {"status": int(status)}:
                self._end(status)
            case _:
                pass

    def _end(self, status: int) -> None:
        if not self.exited.is_set():
            self.status = status
            if self._pid is not None:
                self.kill()
                has_ended(-self.pid)
            self.exited.set()
            self.ready.set()
            self._settle()
            asyncio.get_running_loop().call_later(DRAIN_SECONDS, self._close)

    def _end_control(self) -> None:
        self._end(-SIGKILL)  # whoever would tell the status was killed

    def _end_stream(self) -> None:
        self._open -= 1
        self._settle()

    def _settle(self) -> None:
        if self.exited.is_set() and not self._open:
            self.silent.set()
