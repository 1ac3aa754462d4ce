"""Recovery of a policy: a saved state and the recorded datums after it → a live training client.

The rebuilt client is probed: it must give the log-probabilities that were recorded when it was
sampled, and its optimizer must count the steps that the datums say it has taken.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tinker import Datum

from adapters.errors import UserError
from adapters.tinker.faults import ServiceRefused
from adapters.tinker.live_policy import LivePolicy, LoraSpec, UpdateResult
from adapters.tinker.service import Service
from tasks.algorithm.advantages import CreditAssignment, find_advantage
from tasks.algorithm.update_method import UpdateMethod
from tasks.checkpoints import CheckpointError, Ledger, policy_version
from tasks.datums import SCHEMA, read_datums, to_datums, write_datums
from tasks.recording.journal import read_journal, seal
from tasks.recording.spans import LLM, Span
from tasks.storage.arrivals import batches_of
from tasks.storage.checksums import verified
from tasks.storage.files import is_written
from tasks.storage.json_files import read_json, write_json
from tasks.storage.run_folder import RunFolder, shard_name
from tasks.storage.tables import arrays, read
from tasks.trajectories import MeanRewards, mean_rewards, write_trajectories

log = logging.getLogger(__name__)


FIRST_LOGPROBS = "probe/first_logprobs"
"""Key, in an update's file, of the first datum's log-probabilities before the update."""

MEANS = "means"
"""Key, in a step's file of rewards, of the mean of each role."""


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
class Evidence:
    """A datum with the log-probabilities of its targets, as some weights have given them.

    `mask` marks the targets that were sampled.
    """

    datum: Datum
    logprobs: np.ndarray
    mask: np.ndarray

    def difference(self, logprobs: np.ndarray) -> float:
        """Return the largest difference of other log-probabilities to the recorded ones."""
        kept = self.mask.astype(bool)
        apart = self.logprobs[kept].astype(np.float64) - logprobs[kept].astype(np.float64)
        return float(np.abs(apart).max())


@dataclass(frozen=True)
class RecordedBatch:
    """Recorded datums of a step; `evidence` is of the weights that the step began with, if any.

    `passes` are the datums of each forward-backward pass, and `count` how many the step has.
    """

    step: int
    count: int
    passes: list[list[Datum]]
    method: UpdateMethod
    evidence: Evidence | None


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

        Missing datums are made again from the step's rollouts and references, byte for byte.
        """
        self._restore(step)
        path, method = self.run.datums(self.policy.name, step), self.era(step).method
        if not is_written(path):
            raise CheckpointError(
                f"{path} is gone, but step {step} must be replayed; put the file back, or fork "
                "the run at an earlier step"
            )
        datums = read_datums(path, method.loss, method.loss_settings)
        by_batch = method.by_batch
        passes = self._split(step, path, datums) if by_batch else method.minibatches(datums)
        evidence = self._evidence(step, path, datums)
        passes = [datums for datums in passes if datums]
        return RecordedBatch(step, len(datums), passes, method, evidence)

    def evidence(self, batch: RecordedBatch) -> Evidence | None:
        """Return evidence of the weights that a step begins with, before it is applied.

        If the step was sampled by earlier weights, a call of a later step is looked for.
        """
        return batch.evidence or self._find_answer(batch.step, batch.method)

    def _split(self, step: int, path: Path, datums: Sequence[Datum]) -> list[list[Datum]]:
        """Split the datums of a step into those of its batches."""
        rollouts = read(path, ["rollout_id"])["rollout_id"].to_pylist()
        named = [*zip(rollouts, datums, strict=True)]
        played = [
            {*read(spans, ["rollout_id"])["rollout_id"].to_pylist()} for spans in self._spans(step)
        ]
        passes = [[datum for rollout, datum in named if rollout in batch] for batch in played]
        if sum(map(len, passes)) != len(datums):
            raise CheckpointError(
                f"{path} has {len(datums)} datums, of which {sum(map(len, passes))} are of the "
                f"batches that step {step} has journals of; put the journals back, since each "
                "batch is a pass of its own"
            )
        return passes

    def _spans(self, step: int) -> list[Path]:
        """Return the Parquet files of a step's batches; missing ones are made of the journals."""
        batches = batches_of(self.run, step)
        return [seal(self.run.journal(batch), self.run.spans(batch)) for batch in batches]

    def _evidence(self, step: int, path: Path, datums: Sequence[Datum]) -> Evidence | None:
        """Return what the update or else, if it was not behind, the sampler recorded of a datum."""
        if not datums:
            return None
        columns = read(path, ["policy_version", "logprobs", "mask"])
        mask, version = arrays(columns["mask"])[0], columns["policy_version"][0].as_py()
        update = self.run.update(self.policy.name, step)
        recorded = read_json(update).get(FIRST_LOGPROBS) if is_written(update) else None
        if recorded is not None:
            return Evidence(datums[0], np.array(recorded), mask)
        if version == policy_version(self.policy.name, step):
            return Evidence(datums[0], arrays(columns["logprobs"])[0], mask)
        return None

    def _find_answer(self, step: int, method: UpdateMethod) -> Evidence | None:
        """Find a call that the weights after `step` updates have answered, in the journals."""
        version = policy_version(self.policy.name, step)
        later = step + 1
        while batches := self.run.journalled(shard_name("train", later)):
            for span in (
                span for batch in batches for span in read_journal(self.run.journal(batch))
            ):
                if span["kind"] == LLM and span["policy_version"] == version:
                    return _evidence_of_call(span, method)
            later += 1
        return None

    def optimizer_steps(self, before: int) -> int | None:
        """Count the optimizer steps before a step; None if the datums that say it are gone.

        A step without datums took none.
        """
        paths = [self.run.datums(self.policy.name, step) for step in range(before)]
        for step in range(before):
            self._restore(step)
        if not all(map(is_written, paths)):
            return None
        counts = [pq.read_metadata(verified(path)).num_rows for path in paths]
        return sum(
            self.era(step).method.optimizer_steps(count) for step, count in enumerate(counts)
        )

    def history(self, step: int) -> list[MeanRewards]:
        """Return the mean rewards of the steps before a step, if its advantage reads them."""
        if not find_advantage(self.era(step).credit.advantage).by_history:
            return []
        return [self._mean_rewards(earlier) for earlier in range(step)]

    def _mean_rewards(self, step: int) -> MeanRewards:
        """Read the mean rewards of a step; a missing file is made of the trajectories."""
        path = self.run.rewards(self.policy.name, step)
        if not is_written(path):
            trajectories = self._trajectories(step)
            if trajectories is None:
                raise CheckpointError(
                    f"{path} is gone, but later steps are compared with step {step}; put the file "
                    "back, or fork the run at an earlier step"
                )
            shaping = self.era(step).credit.rewards_query
            write_json(path, {MEANS: mean_rewards(read(trajectories), shaping)})
        return read_json(path)[MEANS]

    def _trajectories(self, step: int) -> Path | None:
        """Return the trajectories of a step, made again if missing; None if its spans are gone."""
        path = self.run.trajectories(self.policy.name, step)
        if not is_written(path):
            spans = self._spans(step)
            if not spans:
                return None
            write_trajectories(path, spans, self.policy.roles)
        return path

    def _restore(self, step: int) -> None:
        datums = self.run.datums(self.policy.name, step)
        if is_written(datums) or (trajectories := self._trajectories(step)) is None:
            return
        credit = self.era(step).credit
        references = self.run.references(self.policy.name, step) if credit.penalty else None
        if references is None or is_written(references):
            write_datums(datums, trajectories, credit, references, self.history(step))


def _evidence_of_call(span: Span, method: UpdateMethod) -> Evidence:
    """Make evidence of a call: its prompt and answer, and the sampler's log-probabilities."""
    prompt, answer = span["prompt_token_ids"], span["response_token_ids"]
    tokens, unsampled = [*prompt, *answer], [0.0] * (len(prompt) - 1)
    row = {
        "tokens": tokens[:-1],
        "targets": tokens[1:],
        "logprobs": [*unsampled, *span["logprobs"]],
        "advantages": [0.0] * (len(tokens) - 1),
        "mask": [*map(int, unsampled), *[1] * len(answer)],
        "scale": 1.0,
    }
    batch = pa.Table.from_pylist([row], schema=SCHEMA)
    logprobs, mask = (arrays(batch[name])[0] for name in ("logprobs", "mask"))
    datum = to_datums(batch, method.loss, method.loss_settings)[0]
    return Evidence(datum, logprobs, mask)


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

    def probe(self, batch: RecordedBatch, evidence: Evidence | None) -> None:
        """Compare with what was recorded, before anything is applied."""
        if evidence is None:
            log.warning("step %d has no datum to probe the rebuilt weights with", batch.step)
        else:
            loss = batch.method.request(batch.step).loss
            logprobs = self.live.probe(batch.step, evidence.datum, loss)
            self._compare(batch.step, evidence, logprobs)

    def replay(self, batch: RecordedBatch) -> None:
        """Apply a recorded batch again, as it was applied before."""
        request = batch.method.request(batch.step)
        submitted = self.live.submit(batch.step, batch.passes, request)
        result = self.live.result(submitted)
        if batch.evidence is not None:
            self._compare(batch.step, batch.evidence, result.logprobs[0])
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

    def _compare(self, step: int, evidence: Evidence, logprobs: np.ndarray) -> None:
        apart = evidence.difference(logprobs)
        largest = max(apart, self.probe_metrics.get("probe/max_difference", 0.0))
        self.probe_metrics["probe/max_difference"] = largest
        log.info("%s: log-probabilities of step %d off by %.3g", self.origin, step, apart)
        if self.tolerance is not None and not apart <= self.tolerance:
            raise ProbeError(
                f"the policy {self.origin} does not give the log-probabilities that were recorded "
                f"at step {step}: those of a datum are off by up to {apart:.3g}, and "
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
        create = self.service.client.create_lora_training_client
        return LivePolicy(
            self.service, self.service.create("a new training client", create, **lora)
        )

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
                what = f"the state of checkpoint {saved.step}"
                client = self.service.create(what, load, saved.state)
            except ServiceRefused as error:
                log.warning("%s. An older state is taken, and more is replayed", error)
                continue
            origin = f"rebuilt from the saved state of checkpoint {saved.step}"
            return LivePolicy(self.service, client), saved.step, origin
        log.warning("no saved state is left: the untrained LoRA is made, and every step replayed")
        seed = self.recorded.policy.lora.seed
        return self.untrained(), 0, f"rebuilt from the untrained LoRA of seed {seed}"
