"""A step's files → what trackers are sent: metrics, and tables of rollouts or texts."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from ratchet.adapters.calls import POLICY
from ratchet.adapters.tinker.bases import Decode, find_decoder
from ratchet.tasks.algorithm.preferences import (
    CHOSEN,
    REJECTED,
    SIDES,
    Pairs,
    Side,
    find_preference,
)
from ratchet.tasks.checkpoints import Checkpoint, Ledger
from ratchet.tasks.metrics import DATUM_LOGPROBS
from ratchet.tasks.recording.scores import read_evaluation
from ratchet.tasks.recording.step_log import Metrics, read_metrics_from
from ratchet.tasks.recording.transcripts import Transcript, read_transcripts
from ratchet.tasks.storage.files import is_written, read_json
from ratchet.tasks.storage.manifest import recipe_of
from ratchet.tasks.storage.names import shard_name
from ratchet.tasks.storage.run_folder import RunFolder
from ratchet.tasks.storage.tables import read_table

SPLIT_BY_SAMPLING = {"sampled": "test", "greedy": "greedy"}
"""Splits of an evaluation's rollouts, by how they were sampled."""

LONGEST_TEXT = 2000
"""Letters of an example, an answer, a text or an error in a table."""

Row = Mapping[str, str | float | None]
"""Row of a table."""


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
        """Return the metrics of the step; {} if it is no step of training."""
        found = read_metrics_from(self.run.metrics, self.number)
        return {name: value for name, value in found[0].items() if name != "step"} if found else {}

    def scores(self) -> Metrics:
        """Return the scores of the checkpoint; {} if it was not evaluated."""
        if not is_written(self._evaluation):
            return {}
        scores = read_evaluation(self._evaluation)
        return {
            name: value
            for how, score in scores.items()
            for name, value in score.metrics(SPLIT_BY_SAMPLING.get(how, how)).items()
        }

    def tables(self, most: int) -> Mapping[str, Sequence[Row]]:
        """Return at most `most` rollouts a table, from the worst reward to the best.

        A step of texts or pairs has a table of these, if its tokenizer is on this machine.
        """
        if most == 0:
            return {}
        found: dict[str, Sequence[Row]] = {}
        for name, spans in self._batches.items():  # failed rollouts first, then by rising reward
            ends = read_transcripts(spans)
            ends.sort(key=lambda one: (one["reward"] is not None, one["reward"] or 0.0))
            found[name] = [*map(_row, ends)]
        found |= given_tables(self.run, self.number)
        return {name: [*map(_cut, _spread(rows, most))] for name, rows in found.items() if rows}

    def weights(self) -> dict[str, Checkpoint]:
        """Map policies to the checkpoints with a training state that the step has made."""
        made = {
            name: Ledger(self.run.checkpoints(name)).find(self.number + 1)
            for name in self.run.policies()
        }
        return {name: one for name, one in made.items() if one is not None and one.state}

    @property
    def _evaluation(self) -> Path:
        return self.run.evaluation(f"{self.checkpoint:05d}")

    @cached_property
    def _batches(self) -> dict[str, list[Path]]:
        """Sealed batches by the name of their table."""
        trained = self.run.batches_of(self.number)
        found = {"rollouts": [self.run.spans(batch) for batch in trained]}
        if is_written(self._evaluation):
            for split in SPLIT_BY_SAMPLING.values():
                shard = shard_name(split, self.checkpoint)
                found[f"{split}/rollouts"] = self.run.sealed(shard)
        return {name: paths for name, paths in found.items() if paths}


def _spread(ranked: Sequence[Row], most: int) -> Sequence[Row]:
    """Return at most `most` rows, evenly spread from the first to the last."""
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
    return {
        column: f"{value[:LONGEST_TEXT]}…"
        if isinstance(value, str) and len(value) > LONGEST_TEXT
        else value
        for column, value in row.items()
    }


def given_tables(run: RunFolder, step: int) -> dict[str, list[Row]]:
    """Return the texts of a step from the lowest loss to the highest, or its pairs by margin.

    There is no table if a policy sampled the step's datums, or without a tokenizer.
    """
    datums, update = run.datums(POLICY, step), run.update(POLICY, step)
    if not (is_written(datums) and is_written(update)):
        return {}
    logprobs: list[float] = read_json(update).get(DATUM_LOGPROBS, [])
    recipe = recipe_of(run)
    decode = find_decoder(recipe["model"]["base"])
    if not logprobs or decode is None:
        return {}
    rows = [
        {**row, "log_p": log_p, "trained": sum(row["mask"])}
        for row, log_p in zip(read_table(datums).to_pylist(), logprobs, strict=True)
    ]
    if "pair" in rows[0]:
        pairs = _pairs(rows, recipe["preference"]["loss"], decode)
        return {"pairs": sorted(pairs, key=_by("margin"))}
    return {"texts": sorted((_text(row, decode) for row in rows), key=_by("loss"))}


def _by(column: str) -> Callable[[Row], float]:
    return lambda row: float(row[column] or 0)


def _text(row: Mapping[str, Any], decode: Decode) -> Row:
    prompt, trained = _split(row, decode)
    weights = np.array(row["advantages"]) * row["mask"]
    loss = -row["log_p"] / float(weights.sum())
    return {"text": row["rollout_id"], "prompt": prompt, "trained": trained, "loss": loss}


def _pairs(rows: Sequence[dict[str, Any]], loss: str, decode: Decode) -> list[Row]:
    """Return a row a pair: both sides, their log-probabilities and the reference's, the margin."""
    sides: dict[int, dict[int, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        row["log_ref"] = float(np.dot(row["mask"], row["references"]))
        sides[row["pair"]][row["side"]].append(row)
    chosen, rejected, mismatched = (
        Side(
            *(
                np.array([sum(row[name] for row in of[side]) for of in sides.values()], float)
                for name in ("log_p", "log_ref", "trained")
            )
        )
        for side in range(len(SIDES))
    )
    margins = find_preference(loss).margins(Pairs(chosen, rejected, mismatched))
    return [
        _pair(of, float(margin), decode) for of, margin in zip(sides.values(), margins, strict=True)
    ]


def _pair(of: Mapping[int, Sequence[dict[str, Any]]], margin: float, decode: Decode) -> Row:
    given = {side: of[SIDES.index(side)] for side in (CHOSEN, REJECTED)}
    first = next(rows[0] for rows in given.values() if rows)
    row: dict[str, str | float | None] = {"pair": first["group_id"]}
    row["prompt"] = _split(first, decode)[0]
    for side, rows in given.items():
        row[side] = "\n".join(_split(one, decode)[1] for one in rows) or None
    row["margin"] = margin
    for side, rows in given.items():
        row[f"{side} log p"] = sum(one["log_p"] for one in rows) if rows else None
        row[f"{side} reference"] = sum(one["log_ref"] for one in rows) if rows else None
    return row


def _split(row: Mapping[str, Any], decode: Decode) -> tuple[str, str]:
    """Return the text before the first trained token, and the trained parts behind it."""
    mask, tokens = row["mask"], [row["tokens"][0], *row["targets"]]
    first = mask.index(1) + 1
    runs = groupby(range(first, len(tokens)), lambda at: mask[at - 1])
    parts = [decode([tokens[at] for at in run]) if trained else " … " for trained, run in runs]
    return decode(tokens[:first]), "".join(parts).removesuffix(" … ")
