"""Agents that are resident programs: a program that is started once and plays all rollouts.

It is started for the first rollout that a process plays. It reads
{id: …, example: …, roles: …}, with the `place` of a rollout that has one, and writes
{id: …, reward: …} or {id: …, error: …}, for several rollouts at once and in any order.
"""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path

from adapters.calls import Example, JsonObject
from adapters.clients.current_rollout import Roles
from adapters.places.place import Place
from adapters.process.program import (
    CommandFailed,
    mask,
    program_environment,
    split_words,
    start_program,
)
from adapters.programs.lasting import (
    AnsweringProgram,
    LastingCommand,
    LastingPrograms,
    lasting_loop,
)


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
        playing = asyncio.run_coroutine_threadsafe(_play(command, request, roles), lasting_loop())
        return await asyncio.wrap_future(playing)

    return play


async def _start(command: LastingCommand) -> AnsweringProgram:
    def process() -> AnsweringProgram:
        return AnsweringProgram(command.line)

    return await start_program(process, command.words, dict(command.variables))


_residents = LastingPrograms(_start)


async def _play(command: LastingCommand, request: JsonObject, roles: Roles) -> object:
    process = await _residents.running(command)
    keys = [of_role["api_key"] for of_role in roles.values()]
    said = await process.ask(request, keys)
    if "reward" in said:
        return said["reward"]
    fact = mask(str(said.get("error", "the answer has neither 'reward' nor 'error'")), keys)
    raise CommandFailed(f"{fact}: the program {command.line!r} failed to play the example")
