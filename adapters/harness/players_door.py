"""The door as the player of a batch asks it: by HTTP from anywhere, or by calls beside it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

import httpx

from ratchet.adapters.clients.libraries import tls
from ratchet.adapters.errors import UserError
from ratchet.adapters.player_protocol import (
    BATCH,
    BEGIN,
    END,
    WAITED,
    BegunBatch,
    R,
    RolloutEnd,
    WaitedTime,
    read_record,
    write_record,
)

ENDS_AT_A_TIME = 4
"""Ends that are told at a time. httpx's pool walks through all that wait for a connection, so a
hundred at once cost five times as much each."""

FEW = httpx.Limits(max_connections=2 * ENDS_AT_A_TIME)
"""Connections of the player itself to the door, beside those of the agents."""


class BatchRefused(UserError):
    """Refusal of the door to hand out a batch, or to record the end of a rollout."""


class PlayersDoor(Protocol):
    """The door for one batch. Each method raises BatchRefused for a refusal."""

    async def begin(self) -> BegunBatch: ...

    async def waited(self, rollout_id: str, attempt: int) -> WaitedTime:
        """Ask for how long the agent of a rollout attempt could get no answer."""
        ...

    async def end(self, rollout_id: str, attempt: int, end: RolloutEnd) -> None:
        """Tell the end of a rollout attempt; return when it is recorded."""
        ...


class HttpDoor:
    """The door at an address, which a client with the token of the batch asks."""

    def __init__(self, address: str, batch: str, http: httpx.AsyncClient) -> None:
        self._address, self._batch, self._http = address, batch, http
        self._ends = asyncio.Semaphore(ENDS_AT_A_TIME)

    async def look(self, seconds: float) -> None:
        """Raise if nobody answers in time, or a door that does not have the batch open."""
        anew = {"connection": "close"}  # one that a lost machine had would wait for its answers
        _check(await self._http.get(self._url(BATCH), headers=anew, timeout=seconds))

    async def begin(self) -> BegunBatch:
        return _read(BegunBatch, await self._http.post(self._url(BEGIN)))

    async def waited(self, rollout_id: str, attempt: int) -> WaitedTime:
        url = self._url(WAITED, rollout_id=rollout_id, attempt=attempt)
        return _read(WaitedTime, await self._http.get(url))

    async def end(self, rollout_id: str, attempt: int, end: RolloutEnd) -> None:
        url = self._url(END, rollout_id=rollout_id, attempt=attempt)
        async with self._ends:
            _check(await self._http.post(url, content=write_record(end)))

    def _url(self, path: str, **named: str | int) -> str:
        return self._address + path.format(batch=self._batch, **named)


@asynccontextmanager
async def door_at(address: str, batch: str, token: str) -> AsyncIterator[HttpDoor]:
    """Open connections to a door for a batch."""
    bearer = {"authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(headers=bearer, timeout=None, verify=tls(), limits=FEW) as http:
        yield HttpDoor(address, batch, http)


def _check(response: httpx.Response) -> None:
    if response.is_error:
        raise BatchRefused(response.json()["error"]["message"])


def _read(kind: type[R], response: httpx.Response) -> R:
    _check(response)
    return read_record(kind, response.content)
