"""A rollout in a process of its own, which may die without any other rollout."""

import json
import os
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress

from adapters.calls import Example
from adapters.clients.current_rollout import Roles
from adapters.harness.agents import AgentExit
from adapters.harness.programs.process import Program, running_program
from adapters.player_protocol import Outcome, read_outcome

PROGRAM = "adapters.harness.isolated_program"


@asynccontextmanager
async def own_process(
    agent: str, example: Example, endpoints: Roles
) -> AsyncIterator[Coroutine[None, None, Outcome]]:
    """Start a process with the agent loaded; yield the outcome of its rollout, to be awaited.

    The process has the environment of this one, and ends with the block or with this process.
    The outcome is AgentExit if the process ends without one.
    """
    given = {"path": sys.path, "agent": agent, "example": example, "endpoints": endpoints}
    words = [sys.executable, "-P", "-m", PROGRAM]
    secrets = [endpoint["api_key"] for endpoint in endpoints.values()]
    async with running_program(words, os.environ, json.dumps(given)) as program:
        await program.spoken.wait()  # loading the agent is no part of its own time
        yield _outcome(program, secrets)


async def _outcome(program: Program, secrets: list[str]) -> Outcome:
    await program.silent.wait()
    with suppress(ValueError):
        for said in program.stdout.last_json():
            return read_outcome(said)
    raise AgentExit(
        f"the agent's process {program.end()} without an outcome, after the process in which it "
        f"played before was lost; look for what ends it{program.stderr.quote(secrets)}"
    )
