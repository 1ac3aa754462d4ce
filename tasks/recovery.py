"""Recovery of a policy: a saved state and the recorded datums after it → a live training client.

The rebuilt client is probed: it must give the log-probabilities that were recorded when it was
sampled, and its optimizer must count the steps that the datums say it has taken.
"""

import logging
from dataclasses import dataclass, field

import numpy as np
import pyarrow.parquet as pq
from tinker import Datum

from adapters.errors import UserError
from adapters.tinker.faults import ServiceRefused
from adapters.tinker.live_policy import LivePolicy, LoraSpec, UpdateMethod, UpdateResult
from adapters.tinker.service import Service
from tasks.advantages import CreditAssignment
from tasks.checkpoints import CheckpointError, Ledger
from tasks.datums import read_datums, write_datums
from tasks.journal import seal
from tasks.storage.checksums import verified
from tasks.storage.files import is_written
from tasks.storage.run_folder import RunFolder, shard_name
from tasks.storage.tables import arrays, read
from tasks.trajectories import write_trajectories

log = logging.getLogger(__name__)


class ProbeError(UserError):
    """Refusal of a rebuilt policy that is not the recorded one."""


@dataclass(frozen=True)
class TrainedPolicy:
    """A policy: its name, the roles whose calls train it, and its weights."""

    name: str
    roles: tuple[str, ...]
    lora: LoraSpec


@dataclass(frozen=True)
class Era:
    """Steps of a run, from `first` on, that were made by one method."""

    first: int
    credit: CreditAssignment
    method: UpdateMethod


@dataclass(frozen=True)
class RecordedBatch:
    """Recorded datums of a step, and what the sampler recorded of the first of them.

    `sampled` are the log-probabilities of the first datum's targets, `mask` marks the trained
    ones; both are empty if there are no datums.
    """

    step: int
    datums: list[Datum]
    method: UpdateMethod
    sampled: np.ndarray
    mask: np.ndarray

    def difference(self, logprobs: np.ndarray) -> float:
        """Return the largest difference to the first datum's recorded log-probabilities."""
        kept = self.mask.astype(bool)
        apart = self.sampled[kept].astype(np.float64) - logprobs[kept].astype(np.float64)
        return float(np.abs(apart).max())


@dataclass(frozen=True)
class RecordedSteps:
    """The recorded steps of a policy: their datums, and the method that each was made by.

    A step belongs to the last of the `eras` that begins at or before the step: the steps that a
    fork shares with its parent were made by the parent's method.
    """

    run: RunFolder
    policy: TrainedPolicy
    eras: tuple[Era, ...]

    def era(self, step: int) -> Era:
        """Return the era of a step."""
        return next(era for era in reversed(self.eras) if era.first <= step)

    def batch(self, step: int) -> RecordedBatch:
        """Read the datums of a step; CheckpointError if they and their sources are gone.

        Missing datums are made again from the step's rollouts, byte for byte.
        """
        self._restore(step)
        path, method = self.run.datums(self.policy.name, step), self.era(step).method
        if not is_written(path):
            raise CheckpointError(
                f"{path} is gone, but step {step} must be replayed; put the file back, or fork "
                "the run at an earlier step"
            )
        columns = read(path, ["logprobs", "mask"])
        sampled, mask = (
            next(iter(arrays(columns[name])), np.empty(0)) for name in columns.schema.names
        )
        return RecordedBatch(step, read_datums(path, method.loss), method, sampled, mask)

    def optimizer_steps(self, before: int) -> int | None:
        """Count the optimizer steps before a step; None if the datums that say it are gone.

        A step without datums took no optimizer step.
        """
        paths = [self.run.datums(self.policy.name, step) for step in range(before)]
        for step in range(before):
            self._restore(step)
        if not all(map(is_written, paths)):
            return None
        return sum(pq.read_metadata(verified(path)).num_rows > 0 for path in paths)

    def _restore(self, step: int) -> None:
        datums = self.run.datums(self.policy.name, step)
        trajectories = self.run.trajectories(self.policy.name, step)
        if is_written(datums):
            return
        if not is_written(trajectories):
            batches = self.run.journalled(shard_name("train", step))
            for batch in batches:
                seal(self.run.journal(batch), self.run.spans(batch))
            spans = self.run.sealed(shard_name("train", step))
            if not spans:
                return
            write_trajectories(trajectories, spans, self.policy.roles)
        write_datums(datums, trajectories, self.era(step).credit)


@dataclass
class RebuiltPolicy:
    """A rebuilt training client, and the measurements that verify it.

    `probe_metrics` go into the update's file: `probe/max_difference` is the largest difference to
    recorded log-probabilities, `probe/optimizer_step` the count that the optimizer gave at its
    first step. `optimizer_steps` is how many steps it must have taken, if that is known; log-
    probabilities may differ by `tolerance`, or by any amount if it is None.
    """

    live: LivePolicy
    origin: str
    """Source of the rebuild, in words."""
    optimizer_steps: int | None
    tolerance: float | None
    probe_metrics: dict[str, float] = field(default_factory=dict)
    _stepped: bool = False

    def probe(self, batch: RecordedBatch) -> None:
        """Compare with what the sampler recorded, before anything is applied."""
        if batch.datums:
            logprobs = self.live.probe(batch.step, batch.datums[0], batch.method)
            self._compare(batch, logprobs)
        else:
            log.warning("step %d has no datum to probe the rebuilt weights with", batch.step)

    def replay(self, batch: RecordedBatch) -> None:
        """Apply a recorded batch again, as it was applied before."""
        submitted = self.live.submit(batch.step, batch.datums, batch.method)
        result = self.live.result(submitted)
        if batch.datums:
            self._compare(batch, result.logprobs[0])
        self.check_optimizer_step(result)

    def check_optimizer_step(self, result: UpdateResult) -> None:
        """Refuse (ProbeError) an optimizer whose first step does not follow the recorded ones."""
        if self._stepped or not result.logprobs:
            return
        self._stepped, taken, known = True, result.optimizer_step, self.optimizer_steps
        if taken is None or known is None:
            log.warning("whether the optimizer %s kept its moments is unknown", self.origin)
            return
        self.probe_metrics["probe/optimizer_step"] = taken
        if taken != known + 1:
            raise ProbeError(
                f"the optimizer {self.origin} says that its first step is number {taken}, but the "
                f"recorded updates make it number {known + 1}: its moments are not those of this "
                "run. The update is not recorded; go on from an earlier checkpoint with "
                "`ratchet fork`"
            )

    def _compare(self, batch: RecordedBatch, logprobs: np.ndarray) -> None:
        apart = batch.difference(logprobs)
        largest = max(apart, self.probe_metrics.get("probe/max_difference", 0.0))
        self.probe_metrics["probe/max_difference"] = largest
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
    """Rebuilder of a policy, from the newest state that loads and the datums recorded after it."""

    service: Service
    ledger: Ledger
    recorded: RecordedSteps
    tolerance: float | None

    def untrained(self) -> LivePolicy:
        """Make the untrained LoRA from its seed."""
        lora = vars(self.recorded.policy.lora)
        made = self.service.client.create_lora_training_client(**lora)
        return LivePolicy(self.service, self.service.result(made, "a new training client"))

    def rebuild(self, step: int) -> RebuiltPolicy:
        """Rebuild the policy after `step` updates, on a client that no request has failed on."""
        doubtful = self.ledger.in_doubt()
        if doubtful is not None:
            log.warning("checkpoint %d was begun but never saved: it is made again", doubtful)
        live, loaded, origin = self._load(step)
        taken = self.recorded.optimizer_steps(loaded)
        rebuilt = RebuiltPolicy(live, origin, taken, self.tolerance)
        for passed in range(loaded, step):
            log.info("replaying the recorded datums of step %d", passed)
            rebuilt.replay(self.recorded.batch(passed))
        return rebuilt

    def _load(self, step: int) -> tuple[LivePolicy, int, str]:
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
            return LivePolicy(self.service, client), saved.step, origin
        log.warning("no saved state is left: the untrained LoRA is made, and every step replayed")
        seed = self.recorded.policy.lora.seed
        return self.untrained(), 0, f"rebuilt from the untrained LoRA of seed {seed}"
