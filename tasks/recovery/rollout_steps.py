"""Steps that rollouts made: their files are made again by the arrows that made them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from tinker import Datum

from ratchet.adapters.errors import UserError
from ratchet.tasks.checkpoints import policy_version
from ratchet.tasks.datums import DATUM_SCHEMA, UpdateMethod, build_datums, to_datums
from ratchet.tasks.judging import record_verdicts
from ratchet.tasks.recording.journal import read_journal, seal
from ratchet.tasks.recording.spans import LLM, Span
from ratchet.tasks.recovery.recorded_steps import Evidence, StepSource, TrainedPolicy
from ratchet.tasks.rewards import compute_rewards
from ratchet.tasks.settings.algorithm import CreditAssignment
from ratchet.tasks.storage.files import is_written
from ratchet.tasks.storage.manifest import ByStep
from ratchet.tasks.storage.names import JUDGE, shard_name
from ratchet.tasks.storage.run_folder import RunFolder
from ratchet.tasks.storage.tables import arrays, read_table
from ratchet.tasks.trajectories import assemble_trajectories


@dataclass(frozen=True)
class RolloutSteps(StepSource):
    """Source of the datums of a policy that is trained on its own rollouts.

    An `expert`'s texts, trained beside the rollouts, have a source of their own.
    """

    run: RunFolder
    policy: TrainedPolicy
    credits: ByStep[CreditAssignment]
    expert: StepSource | None = None

    def restore(self, step: int) -> None:
        """Make missing datums again from the step's rollouts and references, byte for byte."""
        if self.expert is not None:
            self.expert.restore(step)
        path, credit = self.run.datums(self.policy.name, step), self.credits.at(step)
        sources = {penalty.source for penalty in credit.algorithm.penalties()}
        references = {s: self.run.references(self.policy.name, step, s) for s in sorted(sources)}
        lost = not all(map(is_written, references.values()))
        if is_written(path) or lost or (trajectories := self._trajectories(step)) is None:
            return
        rewards = self._rewards(step, trajectories)
        build_datums.make(path, trajectories, rewards, credit, references)

    def batches(self, step: int, datums: Sequence[Datum]) -> list[list[Datum]]:
        """Split the datums of a step by its batches; UserError if a journal is gone."""
        path = self.run.datums(self.policy.name, step)
        rollouts = read_table(path, ["rollout_id"])["rollout_id"].to_pylist()
        named = [*zip(rollouts, datums, strict=True)]
        played = [
            {*read_table(spans, ["rollout_id"])["rollout_id"].to_pylist()}
            for spans in self._spans(step)
        ]
        split = [[datum for rollout, datum in named if rollout in batch] for batch in played]
        if sum(map(len, split)) != len(datums):
            raise UserError(
                f"{path} has {len(datums)} datums, and {sum(map(len, split))} are of the "
                f"batches that step {step} has journals of; put the journals back, since each "
                "batch is a pass of its own"
            )
        return split

    def evidence(self, step: int, method: UpdateMethod) -> Evidence | None:
        """Find a call of a later step that the weights after `step` updates have answered."""
        version = policy_version(self.policy.name, step)
        later = step + 1
        while batches := self.run.journalled(shard_name("train", later)):
            for batch in batches:
                for span in read_journal(self.run.journal(batch)):
                    if span["kind"] == LLM and span["policy_version"] == version:
                        return _evidence_of_call(span, method)
            later += 1
        return None

    def _spans(self, step: int) -> list[Path]:
        """Return the Parquet files of a step's batches; missing files are made of the journals."""
        batches = self.run.batches_of(step)
        return [seal(self.run.journal(batch), self.run.spans(batch)) for batch in batches]

    def _trajectories(self, step: int) -> Path | None:
        """Return the trajectories of a step, made again if missing; None if its spans are gone."""
        path = self.run.trajectories(self.policy.name, step)
        if is_written(path):
            return path
        spans = self._spans(step)
        return assemble_trajectories.make(path, spans, self.policy.roles) if spans else None

    def _rewards(self, step: int, trajectories: Path) -> Path:
        """Return the rewards of a step, made again if missing."""
        path = self.run.rewards(self.policy.name, step)
        if is_written(path):
            return path
        credit = self.credits.at(step)
        verdicts = self._verdicts(step) if credit.judged else None
        return compute_rewards.make(path, trajectories, credit.algorithm.rewards, verdicts)

    def _verdicts(self, step: int) -> Path:
        """Return what a judge said of a step, made again of its journals if missing."""
        path = self.run.verdicts(step)
        batches = self.run.journalled(shard_name(JUDGE, step))
        if not is_written(path) and not batches:
            raise UserError(
                f"{path} and the journals of the judge of step {step} are gone; put them "
                "back, or fork the run at an earlier step"
            )
        spans = [seal(self.run.journal(batch), self.run.spans(batch)) for batch in batches]
        return record_verdicts.make(path, spans)


def _evidence_of_call(span: Span, method: UpdateMethod) -> Evidence:
    """Make evidence of a call: its prompt and answer, and the sampler's log-probabilities."""
    prompt_token_ids, response_token_ids = span["prompt_token_ids"], span["response_token_ids"]
    tokens = [*prompt_token_ids, *response_token_ids]
    unsampled = [0.0] * (len(prompt_token_ids) - 1)
    row = {
        "tokens": tokens[:-1],
        "targets": tokens[1:],
        "logprobs": [*unsampled, *span["logprobs"]],
        "advantages": [0.0] * (len(tokens) - 1),
        "mask": [*map(int, unsampled), *[1] * len(response_token_ids)],
        "scale": 1.0,
    }
    table = pa.Table.from_pylist([row], schema=DATUM_SCHEMA)
    logprobs, mask = (arrays(table[name])[0] for name in ("logprobs", "mask"))
    datum = to_datums(table, method.loss, method.loss_settings)[0]
    return Evidence(datum, logprobs, mask)
