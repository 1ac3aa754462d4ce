"""Agents that are resident programs: a program that is started once and plays all rollouts.

It is started for the first rollout that a process plays. It reads
{id: …, example: …, roles: …}, with the `place` of a rollout that has one, and writes
{id: …, reward: …} or {id: …, error: …}, for several rollouts at once and in any order.
"""

import asyncio
import atexit
import json
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TypeVar, cast

from ratchet.adapters.calls import Example, JsonObject
from ratchet.adapters.clients.current_rollout import Roles
from ratchet.adapters.places.place import Place
from ratchet.adapters.process.clock import Wait
from ratchet.adapters.process.event_loop import on_lasting_loop
from ratchet.adapters.process.program import (
    CommandFailed,
    Program,
    mask,
    program_environment,
    split_words,
    start_program,
)

LONGEST_LINE = 16 * 2**20
"""Bytes of an answer. A longer line ends its program, since nobody knows whose answer it is."""

CANCEL_SECONDS = 10.0
"""Time in which a program must answer a request that was cancelled; later it is held to hang."""

END_LOOK_SECONDS = 0.1
"""Time between two looks for that answer."""


@dataclass(frozen=True)
class LastingCommand:
    """A program's command line, folder and environment; equal commands share a program."""

    line: str
    words: tuple[str, ...]
    folder: Path
    variables: tuple[tuple[str, str], ...]


ProgramT = TypeVar("ProgramT", bound=Program)
_starting = asyncio.Lock()
_running: dict[LastingCommand, Program] = {}


async def lasting_program(
    command: LastingCommand, start: Callable[[LastingCommand], Awaitable[ProgramT]]
) -> ProgramT:
    """Return the process of a command; start it if it does not run."""
    async with _starting:
        process = _running.get(command)
        if process is None or process.exited.is_set():
            process = _running[command] = await start(command)
    return cast("ProgramT", process)


@atexit.register
def kill_programs() -> None:
    for process in _running.values():
        if not process.exited.is_set():
            process.kill()


def resident(line: str) -> Callable[..., Coroutine[None, None, object]]:
    """Return the agent that the resident program of the command `line` plays.

    The words and the environment are as for `command`, without the variables of the roles. The
    agents of this process that have the same line, folder and environment share one program.
    """
    words = split_words("resident", line)

    async def play(
        example: Example, *, roles: Roles, place: Place | None = None, **_: str
    ) -> object:
        command = LastingCommand(line, (*words,), Path.cwd(), (*program_environment().items(),))
        request: JsonObject = {"example": example, "roles": roles}
        if place is not None:
            request["place"] = str(place.work)
        keys = [of_role["api_key"] for of_role in roles.values()]
        said = await on_lasting_loop(_ask(command, request, keys))
        if "reward" in said:
            return said["reward"]
        fact = mask(str(said.get("error", "the answer has neither 'reward' nor 'error'")), keys)
        raise CommandFailed(f"{fact}: the program {line!r} failed to play the example")

    return play


async def _ask(command: LastingCommand, request: JsonObject, keys: Collection[str]) -> JsonObject:
    program = await lasting_program(command, _start)
    return await program.ask(request, keys)


async def _start(command: LastingCommand) -> "AnsweringProgram":
    return await start_program(
        lambda: AnsweringProgram(command.line), command.words, dict(command.variables)
    )


class AnsweringProgram(Program):
    """A process that answers each request by a line with the request's id, in any order."""

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

    async def ask(self, request: Mapping[str, object], keys: Collection[str]) -> JsonObject:
        """Send a request, and wait for its answer; CommandFailed if the process ends first.

        A request that is cancelled is announced with {"id": …, "cancelled": true}.
        """
        number = next(self._numbers)
        self._keys |= {*keys}
        answer = self._unanswered[number] = asyncio.get_running_loop().create_future()
        self._write({"id": number, **request})
        try:
            return await answer
        except asyncio.CancelledError:
            if number in self._unanswered:
                self._write({"id": number, "cancelled": True})
                look = asyncio.create_task(self._kill_unless_answered(number))
                self._looking.add(look)
                look.add_done_callback(self._looking.discard)
            raise

    def kill_since(self, reason: str) -> None:
        """Kill the program; the error of what it has not answered tells why."""
        self._reason = f", since {reason}"
        self.kill()

    def _write(self, request: Mapping[str, object]) -> None:
        self.stdin.write(json.dumps(request).encode() + b"\n")

    async def _kill_unless_answered(self, number: int) -> None:
        waiting = Wait("the answer to a rollout that was cancelled", CANCEL_SECONDS)
        while number in self._unanswered and not self.exited.is_set():
            if waiting.over:
                self.kill_since(f"it had not answered a cancelled one in {CANCEL_SECONDS:g} s")
                return
            await asyncio.sleep(END_LOOK_SECONDS)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        super().pipe_data_received(fd, data)
        if fd == 1:
            self._partial_line += data
            whole = b"\n" in data
            lines = self._partial_line.split(b"\n") if whole else [self._partial_line]
            if any(len(line) > LONGEST_LINE for line in lines):
                self.kill_since(f"it wrote a line of more than {LONGEST_LINE} bytes")
            *answers, self._partial_line = lines
            for line in answers:
                self._read(line)

    def _read(self, line: bytearray) -> None:
        """Give an answer to the request that it names; any other line is ignored."""
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
