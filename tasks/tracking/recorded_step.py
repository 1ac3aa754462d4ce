"""A step's files → what trackers are sent of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from adapters.calls import POLICY
from adapters.tracking.tracker import Row, SavedWeights, TrackedCall
from tasks.checkpoints import Ledger
from tasks.recording.scores import read_evaluation
from tasks.recording.spans import LLM
from tasks.recording.step_log import Metrics, read_metrics
from tasks.recording.transcripts import Transcript, read_transcripts
from tasks.storage.arrivals import batches_of
from tasks.storage.checksums import verified
from tasks.storage.files import is_written
from tasks.storage.names import BASELINE, parse_batch, parse_rollout, shard_name
from tasks.storage.run_folder import RunFolder
from tasks.storage.tables import query_beside, select
from tasks.tracking.given_step import read_given

QUERY = query_beside(__file__)

SPLITS = {"sampled": "test", "greedy": "greedy"}
"""Splits of an evaluation's rollouts, by how they were sampled."""

LONGEST_TEXT = 2000
"""Letters of an example, an answer, a text or an error in a table."""


@dataclass(frozen=True)
class RecordedStep:
    """Step of a run, and the evaluation of the checkpoint `lag` steps before it.

    A number after the last step has an evaluation alone.
    """

    run: RunFolder
    number: int
    lag: int

    @property
    def checkpoint(self) -> int:
        """Checkpoint whose evaluation has been scored when the step is done."""
        return self.number - self.lag

    def metrics(self) -> Metrics:
        """Return the metrics of the step, none if it is no step of training."""
        found = read_metrics(self.run.metrics)[self.number :]
        return {name: value for name, value in found[0].items() if name != "step"} if found else {}

    def scores(self) -> Metrics:
        """Return the scores of the checkpoint, none if it was not evaluated."""
        if not is_written(self._evaluation):
            return {}
        scores = read_evaluation(self._evaluation)
        return {
            name: value
            for how, score in scores.items()
            for name, value in score.metrics(SPLITS.get(how, how)).items()
        }

    def seconds(self) -> float:
        """Return when the file that ended the step was written."""
        updates = self.run.update(POLICY, self.number)
        return (updates if is_written(updates) else self._evaluation).stat().st_mtime

    def tables(self, most: int) -> Mapping[str, Sequence[Row]]:
        """Return tables of at most so many rollouts, from the worst reward to the best.

        A step of texts or pairs has a table of these, if its tokenizer is on this machine.
        """
        if most == 0:
            return {}
        found: dict[str, Sequence[Row]] = {
            name: [*map(_row, _ranked(read_transcripts(spans)))]
            for name, spans in self._batches.items()
        }
        found |= read_given(self.run, self.number)
        return {name: [*map(_cut, _spread(rows, most))] for name, rows in found.items() if rows}

    def weights(self) -> list[SavedWeights]:
        """Return the checkpoints with a training state that the step has made."""
        made = {
            p: Ledger(self.run.checkpoints(p)).find(self.number + 1) for p in self.run.policies()
        }
        return [
            SavedWeights("" if name == POLICY else name, saved.step, saved.sampler, saved.state)
            for name, saved in made.items()
            if saved is not None and saved.state is not None
        ]

    def calls(self) -> list[TrackedCall]:
        """Return the calls and the attempts of the step's rollouts and of the evaluation's."""
        spans = [verified(path) for paths in self._batches.values() for path in paths]
        return [_call(row) for row in select(QUERY, spans=spans).to_pylist()] if spans else []

    @property
    def _evaluation(self) -> Path:
        return self.run.evaluation(f"{self.checkpoint:05d}")

    @cached_property
    def _batches(self) -> dict[str, list[Path]]:
        """Sealed batches by the name of their table."""
        trained = [b for b in batches_of(self.run, self.number) if parse_batch(b).split != BASELINE]
        found = {"rollouts": [self.run.spans(batch) for batch in trained]}
        if is_written(self._evaluation):
            for split in SPLITS.values():
                shard = shard_name(split, self.checkpoint)
                found[f"{split}/rollouts"] = self.run.sealed(shard)
        return {name: paths for name, paths in found.items() if paths}


def _ranked(rollouts: Sequence[Transcript]) -> list[Transcript]:
    """Return rollouts in order: those that failed come first, then they rise in reward."""
    return sorted(rollouts, key=lambda one: (one["reward"] is not None, one["reward"] or 0.0))


def _spread(ranked: Sequence[Row], most: int) -> Sequence[Row]:
    """Return at most so many, evenly from the first to the last."""
    if len(ranked) <= most:
        return ranked
    last = len(ranked) - 1
    return [ranked[place * last // max(most - 1, 1)] for place in range(most)]


def _row(rollout: Transcript) -> Row:
    answers = [one["response"] for one in rollout["interactions"]]
    return {
        "rollout": rollout["rollout_id"],
        "example": rollout["example"],
        "answer": answers[-1] if answers else None,
        "reward": rollout["reward"],
        "error": rollout["error"],
    }


def _cut(row: Row) -> Row:
    """Cut the long texts of a row."""
    return {
        column: f"{value[:LONGEST_TEXT]}…"
        if isinstance(value, str) and len(value) > LONGEST_TEXT
        else value
        for column, value in row.items()
    }


def _call(row: Mapping[str, Any]) -> TrackedCall:
    attributes = {name.replace("__", "."): value for name, value in row.items() if "__" in name}
    attributes["ratchet.step"] = parse_rollout(row["rollout"]).step
    model = row["gen_ai__request__model"] or ""
    return TrackedCall(
        id=row["id"],
        attempt=row["attempt"],
        rollout=row["rollout"],
        name=f"chat {model}".strip() if row["kind"] == LLM else "invoke_agent",
        started=row["started"],
        ended=row["ended"],
        attributes=attributes,
        error=row["error"],
        messages=row["messages"] or "",
        reply=row["reply"] or "",
    )
