"""checkpoint × datums → checkpoint: forward-backward and optimizer step, submitted back to back."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex

import numpy as np

from adapters.calls import Sampler
from adapters.tinker.faults import ServiceFailed, ServiceRefused
from adapters.tinker.live_policy import Lora, Method, Trainee
from adapters.tinker.service import Service
from tasks.checkpoints import Checkpoint, Ledger
from tasks.recovery import Rebuilder, Rebuilt, read_batch

__all__ = ["Learner", "Lora", "Method", "Update"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Update:
    """What an update measured."""

    logprobs: list[np.ndarray]
    """Each datum's, before the update."""
    proof: dict[str, float]
    """Of the rebuild before it, as in `Rebuilt`; empty if the client was live."""


@dataclass
class Learner:
    """The one owner of the training client, which no other process can attach to.

    It knows the step that its live weights stand at. The weights of any other step are rebuilt:
    the last state saved before it, and the recorded datums since, each applied once.
    """

    service: Service
    ledger: Ledger
    datums: Callable[[int], Path]
    """The recorded datums of a step."""
    lora: Lora
    method: Callable[[int], Method]
    """Of a step: the steps that a fork shares with its parent were made by the parent's."""
    ttl_seconds: int | None
    probe_tolerance: float | None = None
    """By how much rebuilt weights may be off the recorded log-probabilities; None only reports."""
    _live: Trainee | None = field(default=None, init=False)
    _rebuilt: Rebuilt | None = field(default=None, init=False)
    """Of the live client, as long as no update has proved it."""
    _step: int = field(default=-1, init=False)

    def initial(self) -> Checkpoint:
        """Checkpoint 0: the untrained LoRA, made and saved if the ledger has none."""
        if self.ledger.last() is not None:
            return self.ledger.at(0)
        trainee = self._rebuilder().untrained()
        checkpoint = trainee.saved(0, trainee.save("00000", self.ttl_seconds, with_state=True))
        self.ledger.add(checkpoint)
        self._live, self._rebuilt, self._step = trainee, None, 0
        return checkpoint

    def sampler(self, checkpoint: Checkpoint) -> Sampler:
        """Samples from a checkpoint; if its weights are no more, they are made and saved anew."""
        try:
            return self.service.sampler(checkpoint.sampler)
        except ServiceRefused as error:
            log.warning("%s. The weights of checkpoint %d are made anew", error, checkpoint.step)
        name = f"{checkpoint.version}-{token_hex(3)}"
        trainee = self._at(checkpoint.step)
        saving = trainee.save(name, self.ttl_seconds, with_state=False)
        made = trainee.saved(checkpoint.step, saving)
        self.ledger.add(Checkpoint(made.step, made.sampler, checkpoint.state))
        return self.service.sampler(made.sampler)

    def update(self, checkpoint: Checkpoint, datums: Path, *, with_state: bool) -> Update:
        """Make the next checkpoint.

        A batch without datums moves nothing: the next checkpoint has the same weights. An update
        that fails leaves no live client behind, since whether it was applied is then unknown.
        """
        step, method = checkpoint.step, self.method(checkpoint.step)
        batch = read_batch(datums, step, method)
        live = self._is_at(step)
        trainee = self._at(step)
        rebuilt, self._live, self._rebuilt = self._rebuilt, None, None
        try:
            if rebuilt is not None:
                rebuilt.look(batch, method)
            self.ledger.begin(step + 1)
            applying = trainee.apply(step, batch.datums, method)
            saving = trainee.save(f"{step + 1:05d}", self.ttl_seconds, with_state=with_state)
            applied = trainee.applied(applying)
            if rebuilt is not None:
                rebuilt.check_warmth(applied)
            self.ledger.applied(step + 1)
            self.ledger.add(trainee.saved(step + 1, saving))
        except ServiceRefused as error:
            if live and error.missing:
                raise _lost(error) from error
            raise
        self._live, self._step = trainee, step + 1
        return Update(applied.logprobs, rebuilt.proof if rebuilt else {})

    def _is_at(self, step: int) -> bool:
        return self._live is not None and self._step == step

    def _at(self, step: int) -> Trainee:
        if self._live is None or self._step != step:
            self._rebuilt = self._rebuilder().rebuilt(step)
            self._live, self._step = self._rebuilt.trainee, step
        return self._live

    def _rebuilder(self) -> Rebuilder:
        return Rebuilder(
            self.service, self.ledger, self.datums, self.lora, self.method, self.probe_tolerance
        )


def _lost(error: ServiceRefused) -> ServiceFailed:
    """A live client that the service has forgotten can be rebuilt, so the update may be retried."""
    return ServiceFailed(f"{error}. The training client is rebuilt")
