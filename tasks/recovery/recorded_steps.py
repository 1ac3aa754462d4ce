"""The recorded steps of a policy: the datums of each, and the method that each was trained by.

A rebuild reads steps here, and does not know what made their datums: that is a `StepSource`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from tinker import Datum

from ratchet.adapters.tinker.live_policy import LoraSpec, Pass, UpdateRequest, apart
from ratchet.tasks.checkpoints import CheckpointError, policy_version
from ratchet.tasks.datums import UpdateMethod, to_datums, units_of
from ratchet.tasks.storage.files import is_written, read_json, verified
from ratchet.tasks.storage.manifest import ByStep
from ratchet.tasks.storage.run_folder import RunFolder
from ratchet.tasks.storage.tables import arrays, read_table

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

    `request` has the datums of each forward-backward pass, `counts` how many each term has.
    `evidence`: recorded log-probabilities under the weights before the step, if there are any.
    """

    step: int
    counts: Sequence[int]
    request: UpdateRequest
    method: UpdateMethod
    evidence: Evidence | None

    def first_pass(self, logprobs: Sequence[list[np.ndarray]]) -> list[list[np.ndarray]]:
        """Return the first log-probabilities of each datum of each term; `logprobs` are by pass."""
        found: list[list[np.ndarray]] = [[] for _ in self.counts]
        for asked, of_pass in zip(self.request.passes, logprobs, strict=True):
            found[asked.term] += of_pass
        return [of_term[:count] for of_term, count in zip(found, self.counts, strict=True)]


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
        terms = method.terms(step)
        of_terms = [
            to_datums(read_table(paths[term.file]), term.loss, term.settings, term.factor)
            for term in terms
        ]
        if method.by_batch and of_terms[0]:
            loss = terms[0].service_loss()
            batches = self.source.batches(step, of_terms[0])
            passes = [[Pass(batch, loss) for batch in batches if batch]]
        else:
            named = zip(of_terms, terms, strict=True)
            passes = method.minibatches(step, [units_of(own, term.loss) for own, term in named])
        evidence = self._evidence(step, paths[0], of_terms[0])
        request = method.request(step, passes)
        return StepDatums(step, [*map(len, of_terms)], request, method, evidence)

    def restored(self, step: int) -> StepDatums:
        """Read the datums of a trained step; CheckpointError if they cannot be restored."""
        self.source.restore(step)
        paths = datum_files(self.run, self.policy.name, step, self.methods.at(step))
        for path in paths:
            if not is_written(path):
                raise CheckpointError(
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

    def _evidence(self, step: int, path: Path, datums: Sequence[Datum]) -> Evidence | None:
        """Return a datum's log-probabilities by the update or else, without lag, by the sampler."""
        if not datums:
            return None
        columns = read_table(path, ["policy_version", "logprobs", "mask"])
        mask, version = arrays(columns["mask"])[0], columns["policy_version"][0].as_py()
        update = self.run.update(self.policy.name, step)
        recorded = read_json(update).get(FIRST_LOGPROBS) if is_written(update) else None
        if recorded is not None:
            return Evidence(datums[0], np.array(recorded), mask)
        if version == policy_version(self.policy.name, step):
            return Evidence(datums[0], arrays(columns["logprobs"])[0], mask)
        return None


def datum_files(run: RunFolder, policy: str, step: int, method: UpdateMethod) -> list[Path]:
    """List the files of the datums that a method trains a policy on."""
    return [run.datums(policy, step), run.expert(policy, step)][: method.files]


def count_optimizer_steps(
    run: RunFolder, policy: str, start: Start | None, methods: ByStep[UpdateMethod], before: int
) -> int | None:
    """Count the optimizer steps of a policy before a step, with the steps of its start."""
    earlier = start.optimizer_steps if start and start.with_optimizer else 0
    for step in range(before):
        method = methods.at(step)
        paths = datum_files(run, policy, step, method)
        if earlier is None or not all(map(is_written, paths)):
            return None
        largest = max(pq.read_metadata(verified(path)).num_rows for path in paths)
        earlier += method.optimizer_steps(largest)
    return earlier
