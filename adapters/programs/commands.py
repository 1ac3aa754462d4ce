"""Agents that are commands: a program that runs once for each rollout.

It reads the example on stdin, unless its words name columns of it, and writes the reward on stdout.
"""

import asyncio
import json
import logging
import os
import re
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

from ratchet.adapters.calls import Example
from ratchet.adapters.clients.current_rollout import Roles, role_variables
from ratchet.adapters.places.cage import program_in
from ratchet.adapters.places.place import Place, names_column
from ratchet.adapters.process.program import (
    CommandFailed,
    Program,
    program_environment,
    running_program,
    split_words,
)

FILLED_IN_KEY = re.compile(r"\$\{\w+_API_KEY\}")

log = logging.getLogger(__name__)


def command(line: str) -> Callable[..., Coroutine[None, None, object]]:
    """Return the agent that runs the command `line`, split like a shell's but run without a shell.

    It runs in its place or, without one, in the current directory. Its environment has
    OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL for its own role, and <ROLE>_BASE_URL and so on
    for every other. The reward is the last line of its stdout that is JSON, unless the recipe has a
    command that scores the place. When it ends or is cancelled, its whole process group is killed.
    """
    words = split_words("command", line)

    async def play(
        example: Example, *, roles: Roles, place: Place | None = None, **_: str
    ) -> object:
        async with started(words, example, roles, place) as program:
            await program.silent.wait()
        return await answer_of(program, line, roles, place)

    return play


@cache
def warn_once(said: str) -> None:
    log.warning("%s", said)


def warn_of_shown_keys(agent: str) -> None:
    """Warn of a key among the words of an agent that is a command, where it is filled in."""
    if shown := FILLED_IN_KEY.search(agent):
        warn_once(
            f"the agent's words have {shown[0]}: whoever may list this machine's processes reads "
            "the key of each rollout while that is played; if the program can read it from a "
            "variable or a file, give it by place.variables or by place.template"
        )


async def answer_of(program: Program, line: str, roles: Roles, place: Place | None) -> object:
    """Return the answer of a program that has ended; CommandFailed if it gave none.

    It is None if the recipe has a command that scores the place.
    """
    keys = [of_role["api_key"] for of_role in roles.values()]
    if place is not None:
        await asyncio.to_thread(place.log, program.said(keys))
        if place.settings.reward and program.began:
            return None
    if program.status == 0 and (found := program.stdout.last_json()):
        return found[0]
    raise CommandFailed(f"the command {line!r} {_failure(program, keys)}")


@asynccontextmanager
async def started(
    words: Sequence[str],
    example: Example,
    roles: Roles,
    place: Place | None,
    inherited: Collection[int] = (),
) -> AsyncIterator[Program]:
    """Start the program of a rollout; it ends with the block."""
    if place is None:
        variables, line = program_environment() | role_variables(roles), json.dumps(example)
        async with running_program(words, variables, line, inherited=inherited) as program:
            yield program
        return
    variables = place.variables(roles)
    filled = [place.fill_in(word, variables, f"the agent's word {word!r}") for word in words]
    if os.sep in filled[0]:  # a path from the folder in which Ratchet runs, not from the place
        filled[0] = str(Path(filled[0]).absolute())
    # Many programs add their stdin to the prompt, and have the example in their words.
    line = "" if any(names_column(word) for word in words) else json.dumps(example)
    async with program_in(place, filled, variables, line, roles, inherited) as program:
        yield program


def _failure(program: Program, secrets: Sequence[str]) -> str:
    """Describe why a program that has ended gave no reward."""
    if not program.began:
        fact = "cannot be started; see why"
    elif program.status == 0:
        fact = "printed no reward; its last line must be a JSON number, or object of roles"
    elif program.status is not None and program.status < 0:
        fact = f"{program.end()}; see why, and run it by hand"
    else:
        fact = f"{program.end()}; it must end with 0"
    return fact + program.stdout.quote(secrets) + program.stderr.quote(secrets)
