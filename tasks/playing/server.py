"""The run's side of its rollouts: the door that answers agents, and the service behind it."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from adapters.door.batches import OpenBatch
from adapters.door.door import Door
from adapters.player_protocol import PlaySettings
from adapters.process.event_loop import run_event_loop
from adapters.tinker.service import Service
from tasks.storage.run_folder import RunFolder

Play = Callable[[str, str, str], Awaitable[None]]
"""Plays a batch: the door's address, the batch's name, and the batch's token."""


class RolloutServer:
    """The run's side of its rollouts: the door that answers the agents, and the service behind it.

    Rollouts that are `judged` need no reward of the agent's.
    """

    def __init__(
        self,
        run: RunFolder,
        door: Door,
        service: Service,
        settings: PlaySettings,
        *,
        judged: bool = False,
    ) -> None:
        self.run = run
        self.door = door
        self.service = service
        self.settings = settings
        self.judged = judged
        self._cancels: set[Callable[[], None]] = set()
        self._cancelled = False

    def play(self, batch: OpenBatch, play: Play) -> None:
        """Have an open batch played; EngineDied if the engine dies meanwhile."""
        run_event_loop(self._play_while_alive(batch, play))

    def cancel(self) -> None:
        """Cancel all batches, also those that begin later; journals keep what was recorded."""
        self._cancelled = True
        for cancel in list(self._cancels):
            with suppress(RuntimeError):  # the batch has ended, and closed its event loop
                cancel()

    async def _play_while_alive(self, batch: OpenBatch, play: Play) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def cancel() -> None:
            loop.call_soon_threadsafe(task.cancel)

        self._cancels.add(cancel)
        try:
            if self._cancelled:
                raise asyncio.CancelledError
            playing = self._play(batch, play)
            await self.service.while_alive(playing, f"the rollouts of {batch.name}")
        finally:
            self._cancels.discard(cancel)

    async def _play(self, batch: OpenBatch, play: Play) -> None:
        with self.door.opened(batch) as token:
            try:
                await play(self.door.address, batch.name, token)
            except Exception:
                await asyncio.wrap_future(self.door.settle(batch))  # no sampled call is lost
                raise
