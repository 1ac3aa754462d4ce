"""Plays one rollout for its user to look into: without a limit of time, and with its error."""

import asyncio
import os
from bdb import BdbQuit
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ratchet.adapters.harness.agents import contained_task
from ratchet.adapters.harness.player import Batch, failure_of, load_for_roles
from ratchet.adapters.harness.players_door import door_at
from ratchet.adapters.places.filling import fill
from ratchet.adapters.places.place import Place
from ratchet.adapters.places.scoring import score
from ratchet.adapters.player_protocol import Outcome
from ratchet.adapters.process.program import MORE_VARIABLES

HOOK = "ratchet_breakpoint"
"""Module that a Python program finds by its `PYTHONPATH`, and its `breakpoint()` by its name."""


async def play_alone(door: str, batch: str, token: str) -> tuple[Outcome, Exception | None]:
    """Play the one rollout of a batch; return its outcome, and what its agent has raised.

    BdbQuit is raised if the user has left the debugger.
    """
    asyncio.get_running_loop().set_task_factory(contained_task)
    async with door_at(door, batch, token) as asked:
        begun = await asked.begin()
    roles, [rollout] = tuple(begun.settings.roles), begun.rollouts
    settings = begun.settings.place
    play = load_for_roles(begun.settings.agent, roles, placed=settings is not None)
    attempt = Batch(door, batch, token, begun.attempt, roles)
    endpoints = attempt.endpoints(rollout.id)
    try:
        with _programs_at_terminal():
            if settings is None:
                return await play(rollout.example, endpoints), None
            place = Place(settings, rollout.id, rollout.example)
            fill(place, place.variables(endpoints))
            reward = await play(rollout.example, endpoints, place)
            return (await score(place) if settings.reward else reward), None
    except BdbQuit:
        raise
    except Exception as error:  # noqa: BLE001  An agent may raise anything; here it is shown.
        return failure_of(error, [attempt.key(rollout.id)]), error


@contextmanager
def _programs_at_terminal() -> Iterator[None]:
    """Have `breakpoint()` of a Python program, whose stdin is not its own, open this terminal."""
    folder = Path(__file__).parent / "on_path"
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {
        "PYTHONPATH": path,
        "PYTHONBREAKPOINT": f"{HOOK}.stop",
        "RATCHET_TERMINAL": os.pathsep.join(map(_path_of, (0, 1))),
    }
    before = MORE_VARIABLES.set(variables)
    try:
        yield
    finally:
        MORE_VARIABLES.reset(before)


def _path_of(descriptor: int) -> str:
    """Return a path by which another process opens a descriptor of this one."""
    if os.isatty(descriptor):
        return os.ttyname(descriptor)
    return f"/proc/{os.getpid()}/fd/{descriptor}"
