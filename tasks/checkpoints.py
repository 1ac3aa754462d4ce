"""The ledger of a run: what was begun, what was applied, what is saved. Resuming is reading it."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from adapters.errors import UserError
from tasks.storage.files import append_line, read_lines

INTENT, APPLIED, SAVED = "intent", "applied", "saved"


class CheckpointError(UserError):
    """The run has no such checkpoint, or its ledger is not one."""


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
    """checkpoints.jsonl: for every checkpoint a line before its update is submitted (`intent`), one
    once the update's results are in (`applied`), and one after what it names is saved (`saved`).

    Lines are never changed. A checkpoint that is made again gets all of them again, and counts as
    it was made last. A line without a phase is a saved one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def checkpoints(self) -> list[Checkpoint]:
        """The saved ones, in the order they were saved."""
        return [
            Checkpoint(line["step"], line["sampler"], line["state"])
            for line in self._lines()
            if line["phase"] == SAVED
        ]

    def last_step(self) -> int:
        """Of the newest checkpoint."""
        return max((c.step for c in self.checkpoints()), default=0)

    def last(self) -> Checkpoint | None:
        return max(self.checkpoints(), key=lambda checkpoint: checkpoint.step, default=None)

    def in_doubt(self) -> int | None:
        """The checkpoint whose update was begun last, if it was never saved: was it applied?"""
        last = next(iter(reversed(self._lines())), None)
        return None if last is None or last["phase"] == SAVED else last["step"]

    def states(self, step: int) -> list[Checkpoint]:
        """The checkpoints up to `step` whose training state was saved: the newest first."""
        saved = [c for c in reversed(self.checkpoints()) if c.state is not None and c.step <= step]
        return sorted(saved, key=lambda checkpoint: -checkpoint.step)

    def at(self, step: int) -> Checkpoint:
        """The checkpoint after `step` updates; the last one made, if it was made more than once."""
        found = [c for c in self.checkpoints() if c.step == step]
        if not found:
            raise CheckpointError(f"{self._path} has no checkpoint {step}; {self._range()}")
        return found[-1]

    def begin(self, step: int) -> None:
        """The update that makes checkpoint `step` is about to be submitted."""
        self._append({"step": step, "phase": INTENT})

    def applied(self, step: int) -> None:
        """Its results are in: the live weights are those of checkpoint `step`."""
        self._append({"step": step, "phase": APPLIED})

    def add(self, checkpoint: Checkpoint) -> None:
        """It is saved."""
        self._append({**asdict(checkpoint), "phase": SAVED})

    def _append(self, line: dict[str, Any]) -> None:
        append_line(self._path, json.dumps(line))

    def _lines(self) -> list[dict[str, Any]]:
        return [self._line(number, text) for number, text in enumerate(read_lines(self._path), 1)]

    def _line(self, number: int, text: str) -> dict[str, Any]:
        try:
            line = {"phase": SAVED, "state": None, **json.loads(text)}
        except (ValueError, TypeError) as error:
            raise self._damaged(number) from error
        named = {"step"} if line["phase"] in (INTENT, APPLIED) else {"step", "sampler"}
        if line["phase"] not in (INTENT, APPLIED, SAVED) or not named <= line.keys():
            raise self._damaged(number)
        return line

    def _damaged(self, number: int) -> CheckpointError:
        return CheckpointError(
            f"line {number} of {self._path} is damaged; remove it, and the checkpoint that it was "
            "of is made again"
        )

    def _range(self) -> str:
        last = self.last()
        return "it has none" if last is None else f"it has 0 to {last.step}"
