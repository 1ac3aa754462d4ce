"""A worker: claims rollouts at a run's door, and plays them in processes of its own.

Agents never run in the process that speaks with the door. One that computes for long would keep it
from renewing its leases, and one that crashes would take it along.
"""

import asyncio
import json
import logging
import os
import socket
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import httpx

from adapters.errors import UserError
from adapters.players import Job, Player, Written, read_job, written_outcome
from adapters.processes import Processes
from adapters.rewards import Reward

ANSWER_SECONDS = 60.0
"""Longer than a claim waits for an offer."""


log = logging.getLogger(__name__)


class WorkerRefused(UserError):
    """The door does not take this worker."""


class DoorGone(Exception):
    """Nobody answers workers at the door: its run has ended, or was cut off."""


async def serve(door: str, token: str, concurrency: int, processes: int) -> None:
    """Play what the run at `door` offers, `concurrency` rollouts at a time, until DoorGone.

    WorkerRefused if the token is not the run's, PlayersFailed if its agent cannot be loaded here.
    What is cancelled gives back what it plays.
    """
    bearer = {"authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(base_url=door, headers=bearer, timeout=ANSWER_SECONDS) as http:
        run = await _answer(http, "GET", "/workers/agent")
        with Processes(run["agent"], processes) as player:
            await player.loaded()
            log.info("playing %s for the run at %s", run["agent"], door)
            await _Claims(http, player, concurrency, run["lease_seconds"]).work()


class _Claims:
    """What one worker plays at one door. Ends with the first error of what it does at once."""

    def __init__(
        self, http: httpx.AsyncClient, player: Player, concurrency: int, lease_seconds: float
    ) -> None:
        self._http = http
        self._player = player
        self._concurrency = concurrency
        self._renewal_seconds = lease_seconds / 3
        self._url = f"/workers/{socket.gethostname()}-{os.getpid()}"
        self._leased: dict[str, asyncio.Task[None]] = {}
        self._has_room = asyncio.Event()
        self._over = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()

    async def work(self) -> None:
        self._start(self._claim())
        self._start(self._renew())
        try:
            await self._over
        finally:
            leases = list(self._leased)
            for task in self._tasks:
                task.cancel()
            with suppress(DoorGone):
                await self._say("leave", {"leases": leases})

    async def _claim(self) -> None:
        while True:
            self._has_room.clear()
            room = self._concurrency - len(self._leased)
            if room:
                claimed = await self._say("claim", {"most": room})
                for rollout in claimed["rollouts"]:
                    lease, job = rollout["lease"], read_job(rollout["job"])
                    self._leased[lease] = self._start(self._play(lease, job))
            else:
                await self._has_room.wait()

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._renewal_seconds)
            if self._leased:
                answer = await self._say("renew", {"leases": list(self._leased)})
                for lease in answer["over"]:
                    if task := self._leased.get(lease):
                        task.cancel()

    async def _play(self, lease: str, job: Job) -> None:
        try:
            outcome = await written_outcome(self._reward(job))
            await self._say("end", {"lease": lease, "outcome": outcome})
        finally:
            del self._leased[lease]
            self._has_room.set()

    async def _reward(self, job: Job) -> Reward:
        async with self._player.begun(job) as playing:
            return await playing.reward

    async def _say(self, what: str, message: Written) -> Written:
        return await _answer(self._http, "POST", f"{self._url}/{what}", message)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error and not self._over.done():
            self._over.set_exception(error)


async def _answer(
    http: httpx.AsyncClient, method: str, url: str, message: Written | None = None
) -> Written:
    body = None if message is None else json.dumps(message)
    headers = {"content-type": "application/json"}
    try:
        response = await http.request(method, url, content=body, headers=headers)
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise WorkerRefused(f"{http.base_url}: {response.json()['error']['message']}")
        if response.status_code == httpx.codes.GONE:
            raise DoorGone(f"the run at {http.base_url} has ended")
        return response.raise_for_status().json()
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise DoorGone(
            f"nobody answers workers at {http.base_url} ({error!r}); if its run goes on, give "
            "--door the address by which it is reached from here"
        ) from error
