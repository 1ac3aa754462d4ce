"""Plays a rollout batch: asks the door what is left, runs the agent, tells the door of each end.

The player needs three strings: the door's address, the batch's name, and the batch's token.
"""

import asyncio
import json
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx

from adapters.calls import POLICY, Example
from adapters.cancelling import cancel_and_wait
from adapters.errors import UserError
from adapters.harness.agents import Endpoint, Play, contained_task, load_agent
from adapters.harness.current_rollout import tls
from adapters.harness.imports import when_imported
from adapters.harness.loop_watchdog import watch_event_loop
from adapters.harness.rewards import Reward

BATCH = "/batch/{batch}"
ROLLOUT = BATCH + "/rollout/{rollout_id}/attempt/{attempt}"
ROLE = ROLLOUT + "/role/{role}/v1"
"""Paths of the door."""

LONGEST_MESSAGE = 100_000
"""Characters that are kept of an error's message."""


@dataclass(frozen=True)
class Batch:
    """An attempt at a batch, as the door has handed it out."""

    door: str
    name: str
    token: str
    attempt: int
    roles: tuple[str, ...]
    timeout_seconds: float

    def url(self, path: str, rollout_id: str, role: str = POLICY) -> str:
        """Return the URL of a rollout's route, or of one of its roles."""
        return self.door + path.format(
            batch=self.name, attempt=self.attempt, rollout_id=rollout_id, role=role
        )

    def endpoints(self, rollout_id: str) -> dict[str, Endpoint]:
        """Return where the agent finds each of its roles."""
        return {
            role: Endpoint(self.url(ROLE, rollout_id, role), api_key=self.token, model=role)
            for role in self.roles
        }


class BatchRefused(UserError):
    """Refusal of the door to hand out a batch, or to record one of its ends."""


async def play_batch(door: str, batch: str, token: str) -> None:
    """Play what is left of a batch, and return when every rollout of this attempt has ended.

    Raises BatchRefused if the door refuses the batch or one of its ends.
    """
    asyncio.get_running_loop().set_task_factory(contained_task)
    bearer = {"authorization": f"Bearer {token}"}
    async with (
        watch_event_loop(),
        httpx.AsyncClient(headers=bearer, timeout=None, verify=tls()) as http,
    ):
        response = await http.post(door + BATCH.format(batch=batch) + "/begin")
        begun = _read(response)
        roles = tuple(begun["roles"])
        attempt = Batch(door, batch, token, begun["attempt"], roles, begun["timeout_seconds"])
        play = load_agent(begun["agent"], [role for role in roles if role != POLICY])
        _provide(roles)
        places = asyncio.Semaphore(begun["concurrency"])
        player = _Player(attempt, play, http, places)
        playing = [
            asyncio.create_task(player.play(rollout["id"], rollout["example"]))
            for rollout in begun["rollouts"]
        ]
        try:
            await asyncio.gather(*playing)
        finally:
            await cancel_and_wait(*playing)


class _Player:
    """Player of the rollouts of one attempt at a batch."""

    def __init__(
        self, batch: Batch, play: Play, http: httpx.AsyncClient, places: asyncio.Semaphore
    ) -> None:
        self._batch = batch
        self._play = play
        self._http = http
        self._places = places

    async def play(self, rollout_id: str, example: Example) -> None:
        """Run the agent on an example, and tell the door how that ended."""
        async with self._places:
            started = time.monotonic()
            outcome = await self._outcome(rollout_id, example)
        end = {**outcome, "seconds": time.monotonic() - started}
        response = await self._http.post(self._url("/end", rollout_id), content=_write(end))
        _read(response)

    async def _outcome(self, rollout_id: str, example: Example) -> dict[str, object]:
        endpoints = self._batch.endpoints(rollout_id)
        try:
            reward = await self._within_time(self._play(example, endpoints), rollout_id)
        except Exception as error:  # noqa: BLE001  An agent may raise anything; here it is a row.
            kind = type(error).__name__
            message = str(error)[:LONGEST_MESSAGE] or f"{kind} without a message"
            return {"failed": kind, "message": message}
        return {"reward": reward.to_json()}

    async def _within_time(self, playing: Coroutine[Any, Any, Reward], rollout_id: str) -> Reward:
        """Await the agent for as long as its own time lasts; TimeoutError when that is over.

        The time in which the agent waits for answers of the door does not count.
        """
        limit, started = self._batch.timeout_seconds, time.monotonic()
        left, work = limit, asyncio.create_task(playing)
        try:
            while left > 0:
                await asyncio.wait([work], timeout=left)
                if work.done():
                    return work.result()
                response = await self._http.get(self._url("/waited", rollout_id))
                waited = _read(response)["seconds"]
                left = limit + waited - (time.monotonic() - started)
        finally:
            await cancel_and_wait(work)
        raise TimeoutError(
            f"the agent took longer than {limit:g} s of its own time, answers not counted; "
            "look for what it waits for, or give a larger rollouts.timeout_seconds"
        )

    def _url(self, route: str, rollout_id: str) -> str:
        return self._batch.url(ROLLOUT + route, rollout_id)


def _write(end: Mapping[str, object]) -> bytes:
    """Write an end as JSON, with a question mark for a character that UTF-8 lacks."""
    return json.dumps(end, ensure_ascii=False).encode(errors="replace")


def _read(response: httpx.Response) -> dict[str, Any]:
    if response.is_error:
        raise BatchRefused(response.json()["error"]["message"])
    return response.json()


@cache
def _provide(roles: tuple[str, ...]) -> None:
    """Have LiteLLM know the roles whenever an agent imports LiteLLM, which takes seconds."""

    def provide_roles() -> None:
        from adapters.harness.litellm_provider import provide

        provide(roles)

    when_imported("litellm", provide_roles)
