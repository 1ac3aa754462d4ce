"""The ledger of a run: one line a checkpoint. Resuming is reading it."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from adapters.errors import UserError
from tasks.files import append_line, read_lines


class CheckpointError(UserError):
    """The run has no such checkpoint."""


@dataclass(frozen=True)
class Checkpoint:
    """The policy after `step` updates; checkpoint 0 is the untrained LoRA."""

    step: int
    sampler: str
    """Address of the weights to sample from, `tinker://…`."""
    state: str | None = None
    """Address of the weights and optimizer to train on from; None if only the sampler was saved."""

    @property
    def version(self) -> str:
        """How spans name it."""
        return f"{self.step:05d}"


class Ledger:
    """checkpoints.jsonl. A line is written after what it names is saved, and never changed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def checkpoints(self) -> list[Checkpoint]:
        """In the order of their steps."""
        return [Checkpoint(**json.loads(line)) for line in read_lines(self._path)]

    def last_step(self) -> int:
        """Of the newest checkpoint."""
        return max((c.step for c in self.checkpoints()), default=0)

    def last(self) -> Checkpoint | None:
        return max(self.checkpoints(), key=lambda checkpoint: checkpoint.step, default=None)

    def saved(self, step: int) -> Checkpoint:
        """The newest checkpoint up to `step` whose training state was saved."""
        saved = [c for c in self.checkpoints() if c.state is not None and c.step <= step]
        return max(saved, key=lambda checkpoint: checkpoint.step)

    def at(self, step: int) -> Checkpoint:
        """The checkpoint after `step` updates; the last one made, if it was made more than once."""
        found = [c for c in self.checkpoints() if c.step == step]
        if not found:
            raise CheckpointError(f"{self._path} has no checkpoint {step}; {self._range()}")
        return found[-1]

    def _range(self) -> str:
        last = self.last()
        return "it has none" if last is None else f"it has 0 to {last.step}"

    def add(self, checkpoint: Checkpoint) -> None:
        append_line(self._path, json.dumps(asdict(checkpoint)))
