"""A door of this process, and the batches that it holds: each has its journal open."""

import asyncio
from concurrent.futures import Future
from contextlib import ExitStack
from typing import NamedTuple, Protocol

from adapters.door.batches import OpenBatch, SampledBy
from adapters.door.door import Door
from adapters.tinker.service import Lifeline
from tasks.doors.recorder import BatchOrder, BatchState, JournalRecorder
from tasks.recording.journal import Journal
from tasks.storage.run_folder import RunFolder


class Opening(NamedTuple):
    """Opening of a batch: the address of its door, and the batch's token."""

    address: str
    token: str


class HeldBatch(Protocol):
    """A batch at a door. No other process has its journal open until it is closed."""

    name: str

    def state(self) -> BatchState:
        """Return how far the batch is."""
        ...

    def answer_by(self, sampled_by: SampledBy) -> None:
        """Have calls answered by these policies, before `start`."""
        ...

    def start(self) -> Opening:
        """Answer for the batch until `stop`."""
        ...

    def settle(self) -> Future[None]:
        """End the attempts under way; the future is done when their calls are recorded."""
        ...

    def stop(self) -> None:
        """Answer for the batch no longer."""
        ...

    def close(self) -> None:
        """Close the journal."""
        ...


class BatchDoor(Protocol):
    """A door of a run, in this process or in another one."""

    def hold(self, order: BatchOrder) -> HeldBatch:
        """Open the journal of a batch; TakenOver if the run has another owner by now."""
        ...


class DoorHere:
    """A run's door that is in this process, with what answers behind it."""

    def __init__(self, door: Door, run: RunFolder, lifeline: Lifeline) -> None:
        self.door = door
        self._run, self._lifeline = run, lifeline

    def hold(self, order: BatchOrder) -> "BatchHere":
        with ExitStack() as opened:
            journal = opened.enter_context(Journal(self._run.journal(order.plan.name)))
            recorder = JournalRecorder(self._run, self._lifeline, order, journal)
            return BatchHere(self.door, self._lifeline, order, recorder, opened.pop_all())


class BatchHere:
    """A batch at a door of this process."""

    def __init__(
        self,
        door: Door,
        lifeline: Lifeline,
        order: BatchOrder,
        recorder: JournalRecorder,
        held: ExitStack,
    ) -> None:
        self.name = order.plan.name
        self._door, self._lifeline, self._recorder = door, lifeline, recorder
        self._settings = order.settings
        self._held = held
        self._opening = ExitStack()
        self._batch: OpenBatch | None = None

    def state(self) -> BatchState:
        return self._recorder.state()

    def answer_by(self, sampled_by: SampledBy) -> None:
        self._batch = OpenBatch(self.name, self._recorder, sampled_by, self._settings)

    def start(self) -> Opening:
        """Answer for the batch until `stop`; meanwhile the log tells of long waits for answers."""
        token = self._opening.enter_context(self._door.opened(self._opened()))
        asked = self._lifeline.while_alive(asyncio.Event().wait(), f"the rollouts of {self.name}")
        telling = asyncio.run_coroutine_threadsafe(asked, self._door.server.loop)
        self._opening.callback(telling.cancel)
        return Opening(self._door.address, token)

    def settle(self) -> Future[None]:
        return self._door.settle(self._opened())

    def stop(self) -> None:
        self._opening.close()

    def close(self) -> None:
        with self._held:
            self.stop()

    def _opened(self) -> OpenBatch:
        assert self._batch is not None, "`answer_by` comes first"
        return self._batch
