"""The ledger of a run whose steps are made of rollout batches as they arrive."""

from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock

from tasks.storage.names import BASELINE, shard_name
from tasks.storage.owners import OwnedLog, Ownership
from tasks.storage.run_folder import RunFolder


class ArrivalLedger(OwnedLog):
    """Ledger of arrivals: the file arrivals.jsonl.

    A batch has a line before its first call is sampled, with the checkpoint that samples it. A step
    has a line before it is trained, with the batches that make it.
    """

    def __init__(self, path: Path, ownership: Ownership | None = None) -> None:
        super().__init__(path, ownership)
        self._lock = Lock()

    def checkpoints(self) -> dict[str, int]:
        """Map each batch that was begun to the checkpoint that samples it."""
        return {line["batch"]: line["checkpoint"] for line in self.rows() if "batch" in line}

    def steps(self) -> dict[int, list[str]]:
        """Map each step that was made to its batches."""
        return {line["step"]: line["batches"] for line in self.rows() if "step" in line}

    def begin(self, batch: str, newest: Callable[[], int]) -> int:
        """Return the checkpoint that samples a batch: the recorded one, or else the newest."""
        with self._lock:
            checkpoint = self.checkpoints().get(batch)
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
        checkpoints = self.checkpoints()
        for step, batches in self.steps().items():
            if step < steps:
                for batch in batches:
                    other.begin(batch, lambda batch=batch: checkpoints[batch])
                other.make(step, batches)


def batches_of(run: RunFolder, step: int) -> list[str]:
    """List the batches that a step is made of: by the ledger, or else by its own shards.

    Batches of greedy baselines are among them.
    """
    recorded = ArrivalLedger(run.arrivals).steps()
    if step in recorded:
        return recorded[step]
    shards = shard_name("train", step), shard_name(BASELINE, step)
    return [batch for shard in shards for batch in run.journalled(shard)]
