"""Agents that are command lines, run once for each rollout: the example on stdin, the reward on
stdout."""

import json
import re
from collections.abc import Callable, Coroutine, Sequence

from adapters.calls import Example
from adapters.clients.current_rollout import Roles
from adapters.harness.programs.process import (
    CommandFailed,
    Program,
    program_environment,
    running_program,
    split_words,
)


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
