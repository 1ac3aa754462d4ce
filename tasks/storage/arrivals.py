"""The ledger of a run whose steps are made of rollout batches as they arrive."""

from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock

from tasks.storage.files import JsonRow
from tasks.storage.names import shard_name
from tasks.storage.owners import OwnedLog, Ownership
from tasks.storage.run_folder import RunFolder


class _Arrived:
    """Contents of a ledger of arrivals."""

    def __init__(self) -> None:
        self.checkpoints: dict[str, int] = {}
        self.steps: dict[int, list[str]] = {}
        self.taken: dict[str, int] = {}

    def append(self, row: JsonRow) -> None:
        if "batch" in row:
            self.checkpoints[row["batch"]] = row["checkpoint"]
        if "step" in row:
            self.steps[row["step"]] = row["batches"]
            self.taken |= dict.fromkeys(row["batches"], row["step"])


class ArrivalLedger(OwnedLog[_Arrived]):
    """Ledger of arrivals: the file arrivals.jsonl.

    A batch has a line before its first call is sampled, with the checkpoint that samples it. A step
    has a line before it is trained, with the batches that make it.
    """

    def __init__(self, path: Path, ownership: Ownership | None = None) -> None:
        super().__init__(path, _Arrived, ownership)
        self._lock = Lock()

    def checkpoint(self, batch: str) -> int | None:
        """Return the checkpoint that samples a batch; None if the batch was not begun."""
        return self.log.ask(lambda known: known.checkpoints.get(batch))

    def batches(self, step: int) -> list[str] | None:
        """Return the batches that make a step; None if the step was not made."""
        return self.log.ask(lambda known: known.steps.get(step))

    def steps(self) -> dict[int, list[str]]:
        """Map each step that was made to its batches."""
        return self.log.ask(lambda known: dict(known.steps))

    def taker(self, batch: str) -> int | None:
        """Return the step that a batch makes; None if there is none yet."""
        return self.log.ask(lambda known: known.taken.get(batch))

    def begin(self, batch: str, newest: Callable[[], int]) -> int:
        """Return the checkpoint that samples a batch: the recorded one, or else the newest."""
        with self._lock:
            checkpoint = self.checkpoint(batch)
            if checkpoint is None:
                checkpoint = newest()
                self.append({"batch": batch, "checkpoint": checkpoint})
            return checkpoint

    def make(self, step: int, batches: Sequence[str]) -> None:
        """Record the batches that make a step."""
        with self._lock:
            self.append({"step": step, "batches": [*batches]})

    def share(self, steps: int, other: "ArrivalLedger") -> None:
        """Record in another ledger how the first steps of this one were made."""
        checkpoints = self.log.ask(lambda known: dict(known.checkpoints))
        for step, batches in self.steps().items():
            if step < steps:
                for batch in batches:
                    other.begin(batch, lambda batch=batch: checkpoints[batch])
                other.make(step, batches)


def batches_of(run: RunFolder, step: int) -> list[str]:
    """List the batches that a step is made of: by the ledger, or else by its own shard."""
    recorded = ArrivalLedger(run.arrivals).batches(step)
    if recorded is not None:
        return recorded
    return run.journalled(shard_name("train", step))
