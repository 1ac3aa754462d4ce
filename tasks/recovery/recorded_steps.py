"""The recorded steps of a policy, and its rebuilding from a saved state and the datums after it.

A rebuild does not know what made the datums of a step: that is a `StepSource`. The rebuilt client
is probed: it must give the log-probabilities that were recorded when it was sampled, and its
optimizer must count the steps that the datums say it has taken.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tinker import Datum, TrainingClient

from ratchet.adapters.calls import POLICY
from ratchet.adapters.errors import UserError
from ratchet.adapters.tinker.live_policy import (
    LivePolicy,
    LoraSpec,
    UpdateRequest,
    UpdateResult,
    apart,
)
from ratchet.adapters.tinker.service import Service, ServiceRefused
from ratchet.tasks.checkpoints import Ledger, policy_version
from ratchet.tasks.datums import UpdateMethod, to_datums, units_of
from ratchet.tasks.storage.files import is_written, read_json, verified
from ratchet.tasks.storage.manifest import ByStep
from ratchet.tasks.storage.run_folder import RunFolder
from ratchet.tasks.storage.tables import arrays, read_table

log = logging.getLogger(__name__)

FIRST_LOGPROBS = "probe/first_logprobs"
"""Key, in an update's file, of the first datum's log-probabilities before the update."""


@dataclass(frozen=True)
class Start:
    """A training state of an earlier run, with its optimizer or without.

    `optimizer_steps` counts the steps that its optimizer has taken; None if it is not known.
    """

    state: str
    with_optimizer: bool
    optimizer_steps: int | None = None


@dataclass(frozen=True)
class TrainedPolicy:
    """A policy: its name, the roles whose calls train it, and its weights.

    Checkpoint 0 is the `start` or, without one, the untrained LoRA.
    """

    name: str
    roles: tuple[str, ...]
    lora: LoraSpec
    start: Start | None = None


@dataclass(frozen=True)
class Evidence:
    """A datum with the log-probabilities of its targets, as some weights have given them.

    `mask` marks the targets that were sampled.
    """

    datum: Datum
    logprobs: np.ndarray
    mask: np.ndarray

    def difference(self, logprobs: np.ndarray) -> float:
        """Return the largest difference of these log-probabilities to the recorded ones."""
        kept = self.mask.astype(bool)
        return apart(self.logprobs[kept], logprobs[kept])


@dataclass(frozen=True)
class StepDatums:
    """Datums of a step, and the method that trains them.

    `tables` are the files, and `request` has the datums of each forward-backward pass.
    `evidence`: recorded log-probabilities under the weights before the step, if there are any.
    """

    step: int
    tables: Sequence[pa.Table]
    request: UpdateRequest
    method: UpdateMethod
    evidence: Evidence | None

    def first_pass(self, logprobs: Sequence[list[np.ndarray]]) -> list[list[np.ndarray]]:
        """Return the first log-probabilities of each datum of each term; `logprobs` are by pass."""
        counts = [len(self.tables[term.file]) for term in self.method.terms(self.step)]
        found: list[list[np.ndarray]] = [[] for _ in counts]
        for asked, of_pass in zip(self.request.passes, logprobs, strict=True):
            found[asked.term] += of_pass
        return [of_term[:count] for of_term, count in zip(found, counts, strict=True)]


class StepSource:
    """Source of a policy's datums: what the run's flow makes them from.

    This class is for datums that nothing else in the run could restore.
    """

    def restore(self, step: int) -> None:
        """Make missing datums of a step again, byte for byte, if their sources are there."""

    def batches(self, step: int, datums: Sequence[Datum]) -> list[list[Datum]]:
        """Split the datums of a step by the rollout batches that they come from."""
        return [[*datums]]

    def evidence(self, step: int, method: UpdateMethod) -> Evidence | None:
        """Find log-probabilities by the weights after `step` updates outside of the datums."""
        return None


@dataclass(frozen=True)
class RecordedSteps:
    """The recorded steps of a policy, with the methods that the manifest records."""

    run: RunFolder
    policy: TrainedPolicy
    methods: ByStep[UpdateMethod]
    source: StepSource

    def read(self, step: int, paths: Sequence[Path]) -> StepDatums:
        """Read the files of a step's datums, as they are trained by the step's method."""
        method = self.methods.at(step)
        terms, tables = method.terms(step), [read_table(path) for path in paths]
        of_terms = [
            to_datums(tables[term.file], term.loss, term.settings, term.factor) for term in terms
        ]
        if method.by_batch and of_terms[0]:
            units = [[batch for batch in self.source.batches(step, of_terms[0]) if batch]]
        else:
            units = [*map(units_of, of_terms, (term.loss for term in terms))]
        evidence = self._evidence(step, tables[0], of_terms[0])
        return StepDatums(step, tables, method.request(step, units), method, evidence)

    def restored(self, step: int) -> StepDatums:
        """Read the datums of a trained step; UserError if they cannot be restored."""
        self.source.restore(step)
        paths = datum_files(self.run, self.policy.name, step, self.methods.at(step))
        for path in paths:
            if not is_written(path):
                raise UserError(
                    f"{path} is gone, but step {step} must be applied again; put the file back, or "
                    "fork the run at an earlier step"
                )
        return self.read(step, paths)

    def evidence(self, datums: StepDatums) -> Evidence | None:
        """Return evidence of the weights that a step begins with, before it is applied."""
        return datums.evidence or self.source.evidence(datums.step, datums.method)

    def optimizer_steps(self, before: int) -> int | None:
        """Count the optimizer steps before a step; None if the datums that say it are gone.

        A step without datums took no optimizer step.
        """
        for step in range(before):
            self.source.restore(step)
        policy = self.policy
        return count_optimizer_steps(self.run, policy.name, policy.start, self.methods, before)

    def _evidence(self, step: int, table: pa.Table, datums: Sequence[Datum]) -> Evidence | None:
        """Return a datum's log-probabilities by the update or else, without lag, by the sampler."""
        if not datums:
            return None
        mask, version = arrays(table["mask"])[0], table["policy_version"][0].as_py()
        update = self.run.update(self.policy.name, step)
        recorded = read_json(update).get(FIRST_LOGPROBS) if is_written(update) else None
        if recorded is not None:
            return Evidence(datums[0], np.array(recorded), mask)
        if version == policy_version(self.policy.name, step):
            return Evidence(datums[0], arrays(table["logprobs"])[0], mask)
        return None


def datum_files(run: RunFolder, policy: str, step: int, method: UpdateMethod) -> list[Path]:
    return [run.datums(policy, step), run.expert(policy, step)][: method.files]


def count_optimizer_steps(
    run: RunFolder, policy: str, start: Start | None, methods: ByStep[UpdateMethod], before: int
) -> int | None:
    earlier = start.optimizer_steps if start and start.with_optimizer else 0
    for step in range(before):
        method = methods.at(step)
        paths = datum_files(run, policy, step, method)
        if earlier is None or not all(map(is_written, paths)):
            return None
        largest = max(pq.read_metadata(verified(path)).num_rows for path in paths)
        earlier += method.optimizer_steps(largest)
    return earlier


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

    def probe(self, datums: StepDatums, evidence: Evidence | None) -> None:
        """Compare with what was recorded, before anything is applied."""
        if evidence is None:
            log.warning("step %d has no datum to probe the rebuilt weights with", datums.step)
        else:
            loss = datums.method.terms(datums.step)[0].service_loss()
            logprobs = self.live.probe(datums.step, evidence.datum, loss)
            self._compare(datums.step, evidence, logprobs)

    def apply(self, datums: StepDatums) -> None:
        """Apply recorded datums again, as they were applied before."""
        result = self.live.result(self.live.submit(datums.step, datums.request))
        if datums.evidence is not None:
            self._compare(datums.step, datums.evidence, result.logprobs[0][0])
        self.check_optimizer_step(result)

    def check_optimizer_step(self, result: UpdateResult) -> None:
        """Refuse (UserError) an optimizer whose step count does not follow the recorded steps."""
        if self._stepped or not result.logprobs:
            return
        self._stepped, taken, known = True, result.optimizer_step, self.optimizer_steps
        if taken is None or known is None:
            log.warning("whether the optimizer %s kept its moments is unknown", self.origin)
            return
        self.probe_metrics["probe/optimizer_step"] = taken
        if taken != known + 1:
            raise UserError(
                f"the optimizer {self.origin} says that its first step is number {taken}, but the "
                f"recorded updates make it number {known + 1}: its moments are not those of this "
                "run. The update is not recorded; go on from an earlier checkpoint with "
                "`ratchet fork`"
            )

    def _compare(self, step: int, evidence: Evidence, logprobs: np.ndarray) -> None:
        difference = evidence.difference(logprobs)
        largest = max(difference, self.probe_metrics.get("probe/max_difference", 0.0))
        self.probe_metrics["probe/max_difference"] = largest
        log.info("%s: log-probabilities of step %d off by %.3g", self.origin, step, difference)
        if self.tolerance is not None and not difference <= self.tolerance:
            raise UserError(
                f"the policy {self.origin} does not give the log-probabilities that were recorded "
                f"at step {step}: those of a datum are off by up to {difference:.3g}, and "
                f"checkpoints.probe_tolerance allows {self.tolerance:g}. Nothing was applied. Go "
                "on from an earlier checkpoint with `ratchet fork` or, if the service is known to "
                "train in another precision than it samples, give a larger tolerance"
            )


@dataclass(frozen=True)
class Rebuilder:
    """Rebuilder of a policy, from the newest state that loads and the datums recorded after it."""

    service: Service
    ledger: Ledger
    recorded: RecordedSteps
    tolerance: float | None

    def initial(self) -> LivePolicy:
        """Make the weights of checkpoint 0: the start or, without one, the LoRA of its seed."""
        client, start = self.service.client, self.recorded.policy.start
        if start is not None:
            return self._client_of(start.state, with_optimizer=start.with_optimizer)
        lora, create = vars(self.recorded.policy.lora), client.create_lora_training_client
        return self._live(self.service.create("a new training client", create, **lora))

    def rebuild(self, step: int) -> RebuiltPolicy:
        """Rebuild the policy after `step` updates, on a client that no request has failed on."""
        doubtful = self.ledger.in_doubt()
        if doubtful is not None:
            log.warning("checkpoint %d was begun but never saved: it is made again", doubtful)
        live, loaded, origin = self._load(step)
        taken = self.recorded.optimizer_steps(loaded)
        rebuilt = RebuiltPolicy(live, origin, taken, self.tolerance)
        for passed in range(loaded, step):
            log.info("applying the recorded datums of step %d again", passed)
            rebuilt.apply(self.recorded.restored(passed))
        return rebuilt

    def _load(self, step: int) -> tuple[LivePolicy, int, str]:
        for saved in self.ledger.states(step):
            assert saved.state is not None
            try:
                live = self._client_of(saved.state, with_optimizer=True)
            except ServiceRefused as error:
                log.warning("%s. An older state is taken, and more steps are applied again", error)
                continue
            return live, saved.step, f"rebuilt from the saved state of checkpoint {saved.step}"
        start, seed = self.recorded.policy.start, self.recorded.policy.lora.seed
        first = f"the start {start.state}" if start else f"the untrained LoRA of seed {seed}"
        log.warning("no saved state is left: every step is applied again to %s", first)
        return self.initial(), 0, f"rebuilt from {first}"

    def _client_of(self, state: str, *, with_optimizer: bool) -> LivePolicy:
        load = self.service.load
        return self._live(load(f"the state {state}", state, with_optimizer=with_optimizer))

    def _live(self, client: TrainingClient) -> LivePolicy:
        name = self.recorded.policy.name
        task = "updates" if name == POLICY else f"policies/{name}/updates"
        return LivePolicy(self.service, client, task)
