"""The door as a player of the same process asks it: by calls on the door's own event loop."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TypeVar

from adapters.calls import Refused
from adapters.door.batches import OpenBatch
from adapters.door.door import Door, begin_batch, end_attempt
from adapters.harness.players_door import BatchRefused, PlayersDoor
from adapters.player_protocol import (
    BegunBatch,
    RolloutEnd,
    WaitedTime,
    read_record,
    write_record,
)

T = TypeVar("T")


class NearDoor:
    """A door of this process for one batch.

    What is told passes through the same records as by HTTP, so that a player cannot change what
    the door holds.
    """

    def __init__(self, door: Door, batch: str, token: str) -> None:
        self._door, self._batch, self._token = door, batch, token

    async def begin(self) -> BegunBatch:
        return read_record(BegunBatch, await self._ask(begin_batch))

    async def waited(self, rollout_id: str, attempt: int) -> WaitedTime:
        async def wait(batch: OpenBatch) -> bytes:
            return write_record(WaitedTime(batch.attempt(rollout_id, attempt).seconds_waited()))

        return read_record(WaitedTime, await self._ask(wait))

    async def end(self, rollout_id: str, attempt: int, end: RolloutEnd) -> None:
        async def tell(batch: OpenBatch) -> None:
            await end_attempt(batch, batch.attempt(rollout_id, attempt), write_record(end))

        await self._ask(tell)

    async def _ask(self, work: Callable[[OpenBatch], Awaitable[T]]) -> T:
        """Work on the door's loop, to the end even if the player leaves meanwhile."""

        async def ask() -> T:
            return await work(self._door.find_batch(self._batch, self._token))

        asked = asyncio.run_coroutine_threadsafe(ask(), self._door.server.loop)
        try:
            return await asyncio.shield(asyncio.wrap_future(asked))
        except Refused as refused:
            raise BatchRefused(refused.message) from refused


def near(
    door: Door, _address: str, batch: str, token: str
) -> AbstractAsyncContextManager[PlayersDoor]:
    """Open a door of this process for a batch."""
    return nullcontext(NearDoor(door, batch, token))
