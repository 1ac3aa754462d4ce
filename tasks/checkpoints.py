"""The ledger of a policy's checkpoints: which ones were begun, and which were saved."""

from dataclasses import asdict, dataclass
from pathlib import Path

from adapters.calls import POLICY
from adapters.errors import UserError
from tasks.storage.files import JsonRow
from tasks.storage.owners import OwnedLog, Ownership

INTENT, SAVED = "intent", "saved"


class CheckpointError(UserError):
    """Refusal of a checkpoint that a run does not have."""


@dataclass(frozen=True)
class Checkpoint:
    """A policy after `step` updates; checkpoint 0 has its initial weights."""

    step: int
    sampler: str
    """Address of the weights to sample from, `tinker://…`."""
    state: str | None = None
    """Address of the weights and optimizer to train on from; None if only the sampler was saved."""


OR_NEWER = "+"
"""End of the name of weights that may have changed while they answered."""


def policy_version(policy: str, step: int) -> str:
    """Return the name of a policy after `step` updates in spans; the main policy's is a number."""
    return f"{step:05d}" if policy == POLICY else f"{policy}@{step:05d}"


def sampled_step(version: str) -> int:
    """Return the step of a `policy_version`: at least as many updates made its weights."""
    return int(version.rpartition("@")[2].removesuffix(OR_NEWER))


def is_version_of(policy: str, version: str) -> bool:
    """Return whether a span's `policy_version` names a checkpoint of this policy: `name@3`."""
    plain = version.removesuffix(OR_NEWER)
    step = plain.rpartition("@")[2]
    return step.isdecimal() and plain == policy_version(policy, int(step))


class _Saved:
    """Contents of a ledger of checkpoints."""

    def __init__(self) -> None:
        self.checkpoints: list[Checkpoint] = []
        self.by_step: dict[int, Checkpoint] = {}
        self.last_step = 0
        self.doubtful: set[int] = set()

    def append(self, row: JsonRow) -> None:
        step = row["step"]
        if row["phase"] != SAVED:
            self.doubtful.add(step)
            return
        saved = Checkpoint(step, row["sampler"], row["state"])
        self.checkpoints.append(saved)
        self.by_step[step] = saved
        self.last_step = max(self.last_step, step)
        self.doubtful.discard(step)


class Ledger(OwnedLog[_Saved]):
    """Ledger of checkpoints: the file checkpoints.jsonl.

    Every checkpoint has two lines: `intent` before its update is submitted, and `saved` when its
    weights are saved, which may be after the intent of the next one. A checkpoint exists when it is
    `saved`, and an update is complete when `updates/<step>.json` exists: an update that is killed
    between the two is made again, on rebuilt weights, with the same result. A checkpoint that is
    made again gets new lines, and the last lines count. Each line has the epoch of the run's owner.
    """

    def __init__(self, path: Path, ownership: Ownership | None = None) -> None:
        super().__init__(path, _Saved, ownership)

    def checkpoints(self) -> list[Checkpoint]:
        """List the saved checkpoints, in the order of saving."""
        return self.log.ask(lambda known: [*known.checkpoints])

    def last_step(self) -> int:
        """Return the step of the newest checkpoint, 0 without a checkpoint."""
        return self.log.ask(lambda known: known.last_step)

    def in_doubt(self) -> int | None:
        """Return the first checkpoint that was begun and never saved since."""
        return self.log.ask(lambda known: min(known.doubtful, default=None))

    def states(self, step: int) -> list[Checkpoint]:
        """List the checkpoints up to `step` that have a training state, the newest first."""
        saved = [c for c in reversed(self.checkpoints()) if c.state is not None and c.step <= step]
        return sorted(saved, key=lambda checkpoint: -checkpoint.step)

    def at(self, step: int | None) -> Checkpoint:
        """Return the checkpoint after `step` updates, or the last; CheckpointError without one."""
        step = self.last_step() if step is None else step
        found = self.find(step)
        if found is None:
            there = f"it has 0 to {self.last_step()}" if self.checkpoints() else "it has none"
            raise CheckpointError(f"{self.path} has no checkpoint {step}; {there}")
        return found

    def find(self, step: int) -> Checkpoint | None:
        """Return the checkpoint after `step` updates as it was saved last, if there is one."""
        return self.log.ask(lambda known: known.by_step.get(step))

    def name(self, step: int) -> str:
        """Return the name under which the run's owner saves checkpoint `step`."""
        owned = self.ownership
        return f"{step:05d}" if owned is None else owned.owner.checkpoint_name(step)

    def begin(self, step: int) -> None:
        """Note that the update that makes checkpoint `step` is about to be submitted."""
        self.append({"step": step, "phase": INTENT})

    def add(self, checkpoint: Checkpoint) -> None:
        self.append({**asdict(checkpoint), "phase": SAVED})

    def append(self, row: JsonRow) -> None:
        epoch = {} if self.ownership is None else {"epoch": self.ownership.owner.epoch}
        super().append(row | epoch)
