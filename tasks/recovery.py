"""saved state × recorded datums → a live training client, and the proof that it is the same."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from tinker import Datum

from adapters.errors import UserError
from adapters.tinker.faults import ServiceRefused
from adapters.tinker.live_policy import Applied, Lora, Method, Trainee
from adapters.tinker.service import Service
from tasks.checkpoints import CheckpointError, Ledger
from tasks.datums import read_datums
from tasks.storage.checksums import verified
from tasks.storage.tables import arrays, read

log = logging.getLogger(__name__)


class ProbeError(UserError):
    """Rebuilt weights are not those that sampled, or their optimizer is not theirs."""


@dataclass(frozen=True)
class Batch:
    """The recorded datums of a step, and what the sampler recorded of the first of them."""

    step: int
    datums: list[Datum]
    sampled: np.ndarray
    """Log-probabilities of the first datum's targets; no entries if there are no datums."""
    mask: np.ndarray

    def difference(self, logprobs: np.ndarray) -> float:
        """By how much the first datum's log-probabilities are off, at most, where it is trained."""
        kept = self.mask.astype(bool)
        apart = self.sampled[kept].astype(np.float64) - logprobs[kept].astype(np.float64)
        return float(np.abs(apart).max())


def read_batch(path: Path, step: int, method: Method) -> Batch:
    """The batch in a datum file."""
    if not path.exists():
        raise CheckpointError(
            f"{path} is gone, but step {step} must be replayed; put the file back, or fork the run "
            "at an earlier step"
        )
    columns = read(path, ["logprobs", "mask"])
    sampled, mask = (
        next(iter(arrays(columns[name])), np.empty(0)) for name in columns.schema.names
    )
    return Batch(step, read_datums(path, method.loss), sampled, mask)


@dataclass
class Rebuilt:
    """A training client that was rebuilt, and what proved it so far: the keys of an update's file.

    `probe/max_difference` is how far recorded log-probabilities were off, at most;
    `probe/optimizer_step` is the count its optimizer gave at its first step after the rebuild.
    """

    trainee: Trainee
    origin: str
    """What it was rebuilt from, in words."""
    optimizer_steps: int | None
    """How many steps its optimizer has taken; None if the datums that say it are gone."""
    tolerance: float | None
    """By how much log-probabilities may be off; None: by any amount."""
    proof: dict[str, float]
    warm: bool = False

    def look(self, batch: Batch, method: Method) -> None:
        """Compare with what the sampler recorded, before anything is applied."""
        if batch.datums:
            self._compare(batch, self.trainee.look(batch.step, batch.datums[0], method))
        else:
            log.warning("step %d has no datum to probe the rebuilt weights with", batch.step)

    def replay(self, batch: Batch, method: Method) -> None:
        """Apply a recorded batch, as it was applied before."""
        applied = self.trainee.applied(self.trainee.apply(batch.step, batch.datums, method))
        if batch.datums:
            self._compare(batch, applied.logprobs[0])
        self.check_warmth(applied)

    def check_warmth(self, applied: Applied) -> None:
        """After the first optimizer step: it must be the one after those that the state holds."""
        if self.warm or not applied.logprobs:
            return
        self.warm, taken, known = True, applied.optimizer_step, self.optimizer_steps
        if taken is None or known is None:
            log.warning("whether the optimizer %s kept its moments is unknown", self.origin)
            return
        self.proof["probe/optimizer_step"] = taken
        if taken != known + 1:
            raise ProbeError(
                f"the optimizer {self.origin} says that its first step is number {taken}, but the "
                f"recorded updates make it number {known + 1}: its moments are not those of this "
                "run. The update is not recorded; go on from an earlier checkpoint with "
                "`ratchet fork`"
            )

    def _compare(self, batch: Batch, logprobs: np.ndarray) -> None:
        apart = batch.difference(logprobs)
        self.proof["probe/max_difference"] = max(apart, self.proof.get("probe/max_difference", 0.0))
        log.info("%s: log-probabilities of step %d off by %.3g", self.origin, batch.step, apart)
        if self.tolerance is not None and not apart <= self.tolerance:
            raise ProbeError(
                f"the policy {self.origin} is not the one that sampled step {batch.step}: its "
                f"log-probabilities of the first datum are off by up to {apart:.3g}, and "
                f"checkpoints.probe_tolerance is {self.tolerance:g}. Nothing was applied. Go on "
                "from an earlier checkpoint with `ratchet fork` or, if the service is known to "
                "train in another precision than it samples, give a larger tolerance"
            )


@dataclass(frozen=True)
class Rebuilder:
    """Makes the policy of a step anew: the newest state that loads, and the datums since."""

    service: Service
    ledger: Ledger
    datums: Callable[[int], Path]
    lora: Lora
    method: Callable[[int], Method]
    tolerance: float | None

    def untrained(self) -> Trainee:
        """The LoRA as its seed makes it."""
        made = self.service.client.create_lora_training_client(**vars(self.lora))
        return Trainee(self.service, self.service.result(made, "a new training client"))

    def rebuilt(self, step: int) -> Rebuilt:
        """The policy after `step` updates, on a client that no failed request has touched."""
        doubtful = self.ledger.in_doubt()
        if doubtful is not None:
            log.warning("checkpoint %d was begun but never saved: it is made anew", doubtful)
        trainee, loaded, origin = self._loaded(step)
        rebuilt = Rebuilt(trainee, origin, self._optimizer_steps(loaded), self.tolerance, {})
        for passed in range(loaded, step):
            log.info("replaying the recorded datums of step %d", passed)
            method = self.method(passed)
            rebuilt.replay(read_batch(self.datums(passed), passed, method), method)
        return rebuilt

    def _loaded(self, step: int) -> tuple[Trainee, int, str]:
        for saved in self.ledger.states(step):
            assert saved.state is not None
            load = self.service.client.create_training_client_from_state_with_optimizer
            try:
                client = self.service.result(
                    load(saved.state), f"the state of checkpoint {saved.step}"
                )
            except ServiceRefused as error:
                log.warning("%s. An older state is taken, and more is replayed", error)
                continue
            origin = f"rebuilt from the saved state of checkpoint {saved.step}"
            return Trainee(self.service, client), saved.step, origin
        log.warning("no saved state is left: the untrained LoRA is made anew, and all is replayed")
        return self.untrained(), 0, f"rebuilt from the untrained LoRA of seed {self.lora.seed}"

    def _optimizer_steps(self, step: int) -> int | None:
        """How many of the steps before `step` had datums: the others took no optimizer step."""
        paths = [self.datums(passed) for passed in range(step)]
        if not all(path.exists() for path in paths):
            return None
        return sum(pq.read_metadata(verified(path)).num_rows > 0 for path in paths)
