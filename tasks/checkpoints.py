"""The ledger of a policy's checkpoints: which ones were begun, saved, and deleted."""

from dataclasses import asdict, dataclass
from pathlib import Path

from ratchet.adapters.calls import POLICY
from ratchet.adapters.errors import UserError
from ratchet.tasks.storage.files import JsonRow
from ratchet.tasks.storage.logs import follow
from ratchet.tasks.storage.owners import Owner, Ownership

INTENT, SAVED, DELETED, GONE = "intent", "saved", "deleted", "gone"


@dataclass(frozen=True)
class Checkpoint:
    """A policy after `step` updates; checkpoint 0 has its initial weights."""

    step: int
    sampler: str
    """Address of the weights to sample from, `tinker://…`."""
    state: str | None = None
    """Address of the weights and optimizer to train on from; None if only the sampler was saved."""

    @property
    def paths(self) -> list[str]:
        """Addresses of all that was saved."""
        return [self.sampler] if self.state is None else [self.sampler, self.state]


def policy_version(policy: str, step: int) -> str:
    """Return the name of a policy after `step` updates in spans; the main policy's is a number."""
    return f"{step:05d}" if policy == POLICY else f"{policy}@{step:05d}"


def sampled_step(version: str) -> int:
    return int(version.rpartition("@")[2])


def is_version_of(policy: str, version: str) -> bool:
    """Return whether a span's `policy_version` names a checkpoint of this policy: `name@3`."""
    step = version.rpartition("@")[2]
    return step.isdecimal() and version == policy_version(policy, int(step))


class _Saved:
    """Contents of a ledger of checkpoints."""

    def __init__(self) -> None:
        self.by_step: dict[int, list[Checkpoint]] = {}
        """Step → the checkpoint each time that it was saved."""
        self.deleted: dict[int, list[Checkpoint]] = {}
        """Step → what the service has still to delete."""
        self.last_step = 0
        self.doubtful: dict[int, int] = {}
        """Step → epoch of the owner that began it last, and has not noted that it is saved."""

    def append(self, row: JsonRow) -> None:
        step = row["step"]
        if row["phase"] == SAVED:
            saved = self.by_step.setdefault(step, self.deleted.pop(step, []))
            saved.append(Checkpoint(step, row["sampler"], row["state"]))
            self.last_step = max(self.last_step, step)
            self.doubtful.pop(step, None)
        elif row["phase"] == DELETED:
            self.deleted[step] = self.by_step.pop(step)
        elif row["phase"] == GONE:
            self.deleted[step] = []
        else:
            self.doubtful[step] = row.get("epoch", 0)


class Ledger:
    """Ledger of checkpoints: the file checkpoints.jsonl.

    Every checkpoint has two lines: `intent` before its update is submitted, and `saved` when its
    weights are saved, which may be after the intent of the next one. A checkpoint exists when it is
    `saved`, and an update is complete when `updates/<step>.json` exists: an update that is killed
    between the two is made again, on rebuilt weights, with the same result. A checkpoint that is
    made again gets new lines, and the last lines count. Each line has the epoch of the run's owner:
    no other process may append one.
    A checkpoint that is deleted gets two more: `deleted` before the service is asked to delete it,
    and `gone` when the service has.
    """

    def __init__(self, path: Path, ownership: Ownership | None = None) -> None:
        self.path, self.ownership = path, ownership
        self.log = follow(path, _Saved)

    def checkpoints(self) -> list[Checkpoint]:
        """List the checkpoints that are kept, each as often as it was saved, the last time last."""
        return self.log.ask(
            lambda known: [one for saved in known.by_step.values() for one in saved]
        )

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
        """Return the checkpoint after `step` updates, or the last; UserError without one."""
        step = self.last_step() if step is None else step
        found = self.find(step)
        if found is None:
            raise UserError(f"{self.path} has {self._lack(step)}")
        return found

    def _lack(self, step: int) -> str:
        kept = dict.fromkeys(checkpoint.step for checkpoint in self.checkpoints())
        if self.is_deleted(step):
            there = ", ".join(map(str, kept))
            return f"checkpoint {step} no more, since it was deleted; it keeps {there}"
        return f"no checkpoint {step}; it has {f'0 to {self.last_step()}' if kept else 'none'}"

    def find(self, step: int) -> Checkpoint | None:
        """Return the checkpoint after `step` updates as it was saved last, if there is one."""
        return self.log.ask(lambda known: next(reversed(known.by_step.get(step, [])), None))

    def is_deleted(self, step: int) -> bool:
        """Return whether checkpoint `step` was deleted, and not made again since."""
        return self.log.ask(lambda known: step in known.deleted)

    def condemned(self) -> dict[int, list[Checkpoint]]:
        """Map each deleted step to what the service has still to delete."""
        return self.log.ask(lambda known: {s: left for s, left in known.deleted.items() if left})

    def name(self, step: int) -> str:
        """Return the name under which the run's owner, and no other, saves checkpoint `step`."""
        return f"{step:05d}" if self.ownership is None else _name(step, self.ownership.owner)

    def unnoted(self) -> set[str]:
        """Return the names under which earlier owners may have saved what has no line here."""
        begun = self.log.ask(lambda known: [*known.doubtful.items()])
        earlier = [] if self.ownership is None else self.ownership.earlier()
        if not self.checkpoints():  # the first one has no intent
            begun += [(0, owner.epoch) for owner in earlier]
        return {_name(step, one) for one in earlier for step, epoch in begun if epoch == one.epoch}

    def begin(self, step: int) -> None:
        """Note that the update that makes checkpoint `step` is about to be submitted."""
        self.append({"step": step, "phase": INTENT})

    def add(self, checkpoint: Checkpoint) -> None:
        self.append({**asdict(checkpoint), "phase": SAVED})

    def delete(self, step: int) -> None:
        """Note that checkpoint `step` is not to be used from now on."""
        self.append({"step": step, "phase": DELETED})

    def forget(self, step: int) -> None:
        """Note that the service has deleted checkpoint `step`."""
        self.append({"step": step, "phase": GONE})

    def append(self, row: JsonRow) -> None:
        """Append a row; UserError if another process has opened the run since."""
        epoch: JsonRow = {}
        if self.ownership is not None:
            self.ownership.check()
            epoch = {"epoch": self.ownership.owner.epoch}
        self.log.append(row | epoch)


def _name(step: int, owner: Owner) -> str:
    return f"{step:05d}-{owner.epoch}-{owner.id}"
