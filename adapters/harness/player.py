"""Plays a rollout batch: asks the door what is left, runs the agent, tells the door of each end.

The player needs three strings: the door's address, the batch's name, and the batch's token. A
rollout may be played in a process of its own, which may die without any other rollout.
"""

import asyncio
import json
import os
import sys
import sysconfig
import time
from bdb import BdbQuit
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from traceback import TracebackException, extract_tb
from types import ModuleType
from typing import TypeVar

from ratchet.adapters.calls import POLICY, Example
from ratchet.adapters.clients.current_rollout import Endpoint, Roles
from ratchet.adapters.clients.libraries import when_imported
from ratchet.adapters.errors import UserError
from ratchet.adapters.harness.agents import AgentExit, Play, contained_task, load_agent
from ratchet.adapters.harness.players_door import PlayersDoor, door_at
from ratchet.adapters.places.filling import fill, leave
from ratchet.adapters.places.place import Place
from ratchet.adapters.places.scoring import score
from ratchet.adapters.player_protocol import (
    ROLE,
    BegunRollout,
    Failure,
    Outcome,
    PlaySettings,
    RolloutEnd,
    read_outcome,
    rollout_key,
    write_record,
)
from ratchet.adapters.process.clock import running_clock
from ratchet.adapters.process.event_loop import cancel_and_wait
from ratchet.adapters.process.open_files import check_files, check_files_after
from ratchet.adapters.process.program import MORE_VARIABLES, Program, mask, running_program
from ratchet.durable.process import collect_garbage, usable_cores, working_folder

ISOLATED_PROGRAM = "ratchet.adapters.harness.isolated_program"


@asynccontextmanager
async def own_process(
    agent: str, example: Example, endpoints: Roles, place: Place | None = None
) -> AsyncIterator[Coroutine[None, None, Outcome]]:
    """Start a process with the agent loaded; yield the outcome of its rollout, to be awaited.

    The process has the environment of this one, and ends with the block or with this process.
    The outcome is AgentExit if the process ends without one.
    """
    given = {
        "path": sys.path,
        "agent": agent,
        "example": example,
        "endpoints": endpoints,
        "place": None if place is None else write_record(place).decode(),
    }
    words = [sys.executable, "-P", "-m", ISOLATED_PROGRAM]
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


HOOK = "ratchet_breakpoint"
"""Module that a Python program finds by its `PYTHONPATH`, and its `breakpoint()` by its name."""

HOUSE = Path(__file__).parents[1]

MOST_ISOLATED = usable_cores()
"""Rollouts of a batch that are played in processes of their own at a time."""

NOT_OWN = tuple(
    f"{folder}{os.sep}"
    for folder in (*map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")), HOUSE)
)
"""Folders of code that is not the user's own: Python's, what is installed, and Ratchet's."""

T = TypeVar("T")


@dataclass(frozen=True)
class Batch:
    """An attempt at a batch, as the door has handed it out."""

    door: str
    name: str
    token: str
    attempt: int
    roles: tuple[str, ...]

    def url(self, path: str, rollout_id: str, role: str = POLICY) -> str:
        return self.door + path.format(
            batch=self.name, attempt=self.attempt, rollout_id=rollout_id, role=role
        )

    def key(self, rollout_id: str) -> str:
        return rollout_key(self.token, rollout_id, self.attempt)

    def endpoints(self, rollout_id: str) -> dict[str, Endpoint]:
        key = self.key(rollout_id)
        return {
            role: Endpoint(base_url=self.url(ROLE, rollout_id, role), api_key=key, model=role)
            for role in self.roles
        }


Reach = Callable[[str, str, str], AbstractAsyncContextManager[PlayersDoor]]
"""Opens the door at an address for a batch, by the batch's token."""


async def play_batch(door: str, batch: str, token: str, reach: Reach = door_at) -> None:
    """Play what is left of a batch, and return when every rollout of this attempt has ended.

    Raises BatchRefused if the door refuses the batch or one of its ends.
    """
    asyncio.get_running_loop().set_task_factory(contained_task)
    async with reach(door, batch, token) as asked:
        begun = await asked.begin()
        roles = tuple(begun.settings.roles)
        play = load_for_roles(begun.settings.agent, roles, placed=begun.settings.place is not None)
        collect_garbage()
        attempt = Batch(door, batch, token, begun.attempt, roles)
        player = _Player(attempt, begun.settings, play, asked)
        playing = [asyncio.create_task(player.play(rollout)) for rollout in begun.rollouts]
        try:
            await asyncio.gather(*playing)
        finally:
            await cancel_and_wait(*playing)


def load_for_roles(agent: str, roles: tuple[str, ...], *, placed: bool) -> Play:
    """Load an agent that calls `roles`, the first its own, and have LiteLLM know them."""
    play = load_agent(agent, roles[1:], placed=placed)
    _provide(roles)
    return play


def failure_of(error: Exception, keys: Collection[str] = ()) -> Failure:
    """Return an error of an agent as it is recorded, without the `keys`."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        [error] = error.exceptions  # as task groups raise it
    kind = type(error).__name__
    told = str(TracebackException(type(error), error, None))  # its `__str__` may raise
    said = f"{told or f'{kind} without a message'}{own_line(error)}"
    return Failure(kind, mask(said, keys))


def own_line(error: Exception) -> str:
    """Say at which line of the user's own code an error came; empty if it came elsewhere.

    The line is the innermost line of a module outside NOT_OWN.
    """
    others = (*NOT_OWN, "<")
    frames = [one for one in extract_tb(error.__traceback__) if not one.filename.startswith(others)]
    if not frames:
        return ""
    file, own = Path(frames[-1].filename), working_folder()
    shown = file.relative_to(own) if file.is_relative_to(own) else file
    return f" at {shown}:{frames[-1].lineno}"


class _Player:
    def __init__(self, batch: Batch, settings: PlaySettings, play: Play, door: PlayersDoor) -> None:
        self._batch = batch
        self._settings = settings
        self._play = play
        self._door = door
        self._open = asyncio.Semaphore(settings.concurrency)
        self._open_isolated = asyncio.Semaphore(MOST_ISOLATED)

    async def play(self, rollout: BegunRollout) -> None:
        """Run the agent on a rollout's example, and tell the door how that ended."""
        play = self._play_isolated if rollout.isolated else self._play_here
        endpoints = self._batch.endpoints(rollout.id)
        async with self._open, self._open_isolated if rollout.isolated else nullcontext():
            started = time.monotonic()
            if (settings := self._settings.place) is None:
                outcome = await play(rollout, endpoints)
            else:
                place = Place(settings, rollout.id, rollout.example)
                outcome = await play_in(place, endpoints, partial(play, rollout, endpoints, place))
        end = RolloutEnd(outcome, time.monotonic() - started)
        await self._door.end(rollout.id, self._batch.attempt, end)

    async def _play_here(
        self, rollout: BegunRollout, endpoints: Roles, place: Place | None = None
    ) -> Outcome:
        try:
            return await self._within_time(self._play(rollout.example, endpoints, place), rollout)
        except Exception as error:  # noqa: BLE001  An agent may raise anything; here it is a row.
            check_files_after(error)  # this process may be able to open no more
            return failure_of(error, [self._batch.key(rollout.id)])

    async def _play_isolated(
        self, rollout: BegunRollout, endpoints: Roles, place: Place | None = None
    ) -> Outcome:
        agent = self._settings.agent
        try:
            async with own_process(agent, rollout.example, endpoints, place) as playing:
                return await self._within_time(playing, rollout)
        except (AgentExit, TimeoutError) as error:
            return failure_of(error)
        except OSError as error:
            check_files(error)
            raise

    async def _within_time(self, playing: Coroutine[None, None, T], rollout: BegunRollout) -> T:
        """Await the agent for as long as its own time lasts; TimeoutError when that is over.

        Time in which the agent waits for answers of the door does not count, nor does time in
        which this process stood still. If the door is in this process, both subtract the same
        stall: the agent then has more time, never less.
        """
        clock = running_clock()
        limit, started = self._settings.timeout_seconds, clock.seconds()
        left, work = limit, asyncio.create_task(playing)
        try:
            while left > 0 or work.done():
                await asyncio.wait([work], timeout=left)
                if work.done():
                    return work.result()
                waited = await self._door.waited(rollout.id, self._batch.attempt)
                left = limit + waited.seconds - (clock.seconds() - started)
        finally:
            await cancel_and_wait(work)
        raise TimeoutError(
            f"the agent took longer than {limit:g} s of its own time, answers not counted; "
            "look for what it waits for, or give a larger rollouts.timeout_seconds"
        )


async def play_in(
    place: Place, endpoints: Roles, play: Callable[[], Awaitable[Outcome]]
) -> Outcome:
    """Fill a place, play a rollout in it, and score it; keep the place if the recipe says so."""
    outcome: Outcome | None = None
    try:
        await asyncio.to_thread(fill, place, place.variables(endpoints))
        played = await play()
        scores = place.settings.reward and not isinstance(played, Failure)
        outcome = await score(place) if scores else played
        return outcome
    except UserError:
        raise  # what this machine lacks, such as a cage
    except Exception as error:  # noqa: BLE001  Programs leave anything in a place; here it is a row.
        check_files_after(error)
        outcome = failure_of(error, [endpoint["api_key"] for endpoint in endpoints.values()])
        return outcome
    finally:
        await asyncio.to_thread(leave, place, outcome)


@cache
def _provide(roles: tuple[str, ...]) -> None:
    """Have LiteLLM know the roles whenever an agent imports LiteLLM, which takes seconds."""

    def provide_roles(_: ModuleType) -> None:
        from ratchet.adapters.clients.litellm_provider import provide

        provide(roles)

    when_imported("litellm", provide_roles)


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
