"""shard → rollouts: the agent, `group_size` times an example, played in batches and journalled.

What the door reports of a batch becomes spans in the batch's journal.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from ratchet.adapters.door.batches import OpenBatch, SampledBy
from ratchet.adapters.door.door import Door
from ratchet.adapters.errors import UserError
from ratchet.adapters.player_protocol import PlaySettings
from ratchet.adapters.process.event_loop import run_in_lasting_loop
from ratchet.adapters.tinker.service import Lifeline
from ratchet.tasks.recording.journal import Journal, seal
from ratchet.tasks.recording.recorder import JournalRecorder
from ratchet.tasks.storage.durability import durable
from ratchet.tasks.storage.files import verified
from ratchet.tasks.storage.names import ShardBatch
from ratchet.tasks.storage.run_folder import RunFolder
from ratchet.tasks.storage.tables import query_beside, select

Play = Callable[[str, str, str], Awaitable[None]]
"""Plays a batch: the door's address, the batch's name, and the batch's token."""

QUERY = query_beside(__file__)


class RolloutHost:
    """Host of a run's rollouts: the door that answers the agents, and the lifeline behind it.

    `judged` rollouts need no reward from the agent.
    """

    def __init__(
        self,
        run: RunFolder,
        door: Door,
        lifeline: Lifeline,
        settings: PlaySettings,
        *,
        judged: bool = False,
    ) -> None:
        self.run = run
        self.lifeline = lifeline
        self.settings = settings
        self.judged = judged
        self._door = door
        self._cancels: set[Callable[[], None]] = set()
        self._cancelled = False

    def play(self, batch: OpenBatch, play: Play) -> None:
        """Open a batch at the door and have it played; EngineDied if the engine dies meanwhile."""
        run_in_lasting_loop(self._play_while_alive(batch, play))

    def cancel(self) -> None:
        """Cancel all batches, also those that begin later; journals keep what was recorded."""
        self._cancelled = True
        for cancel in list(self._cancels):
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
            what = f"the rollouts of {batch.name}"
            await self.lifeline.while_alive(self._play(batch, play), what)
        finally:
            self._cancels.discard(cancel)

    async def _play(self, batch: OpenBatch, play: Play) -> None:
        with self._door.opened(batch) as token:
            try:
                await play(self._door.address, batch.name, token)
            except Exception:
                await asyncio.wrap_future(self._door.supersede(batch))  # no sampled call is lost
                raise


@durable
def collect_rollouts(
    path: Path,
    shard: Path,
    batch: ShardBatch,
    host: RolloutHost,
    sampled_by: Callable[[], SampledBy],
    play: Play,
) -> None:
    """Play what is left of a batch, and seal its journal into Parquet.

    UserError if the run has another owner by now.
    """
    run, lifeline = host.run, host.lifeline
    with Journal(run.journal(batch.name)) as journal:
        recorder = JournalRecorder(run, lifeline, batch, shard, journal, judged=host.judged)
        if not recorder.finished:
            opened = OpenBatch(batch.name, recorder, sampled_by(), host.settings)
            while not recorder.finished:
                try:
                    host.play(opened, play)
                except UserError as error:
                    lifeline.check()
                    raise recorder.fault or error from error
                if recorder.stuck and recorder.fault is not None:
                    raise recorder.fault
    seal(run.journal(batch.name), path)


def measure_yield(spans: Sequence[Path]) -> tuple[int, int]:
    """Count the groups of sealed batches whose rewards are not all equal, and the calls."""
    [row] = select(QUERY, spans=[verified(path) for path in spans]).to_pylist()
    return row["teaching_groups"], row["calls"]
