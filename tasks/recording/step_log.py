"""The log of a run's steps, metrics.jsonl: one flat row of numbers for each finished step."""

from collections.abc import Mapping, Sequence
from math import fsum
from pathlib import Path

from ratchet.tasks.storage.files import JsonRow
from ratchet.tasks.storage.logs import FollowedLog, follow

Metrics = dict[str, float]

COST = "cost/"
"""Prefix of a role's name: what its calls cost, in US dollars."""
SPENDING, USD = "spent/", "usd"
"""Prefix of what a run has spent since the step before: tokens by kind, seconds, and dollars of the
service if its model has a price. Two equal runs differ in it."""
REWARDED = "rollouts/rewarded/"
"""Prefix of an error's name: how many rollouts it has ended, and had its reward."""
EQUAL_REWARDS = "the rewards of each group were equal"
"""The commonest reason for a step that trains nothing."""
DATUMS, EXPERT_TOKENS = "datums", "expert/tokens"
"""What a step has trained: the datums of a policy, named before it, and an expert's texts."""


def record_metrics(path: Path, step: int, metrics: Mapping[str, float]) -> None:
    """Append a step's line to metrics.jsonl, which ends the step; a step has one line only."""
    log = _log(path)
    if log.ask(lambda rows: not rows or rows[-1]["step"] < step):
        log.append({"step": step, **metrics})


def read_metrics(path: Path) -> list[Metrics]:
    """Read the lines of metrics.jsonl, in order; an empty list if there is no such file.

    Others read the same rows, which nobody changes.
    """
    return _log(path).ask(list[Metrics])


def read_metrics_from(path: Path, step: int) -> list[Metrics]:
    """Read the lines of the steps from a number on."""
    return _log(path).ask(lambda rows: rows[step:])


def steps_done(path: Path) -> int:
    return _log(path).ask(len)


def spent_seconds(rows: Sequence[Mapping[str, float]]) -> float:
    """Sum the seconds of sampling and of training, without start-up and evaluation.

    Every policy has its training. With a lag the two overlap, and the sum is no duration.
    """
    endings = ("seconds/sampling", "seconds/training")
    return fsum(row[name] for row in rows for name in row if name.endswith(endings))


def why_untrained(metrics: Mapping[str, float]) -> str:
    """Say why a step has trained no policy; empty if it has trained one.

    Advantages compare the rewards of a group, so that equal ones teach nothing.
    """
    counted = [metrics[key] for key in metrics if key.endswith(DATUMS) or key == EXPERT_TOKENS]
    if not counted or any(counted):
        return ""
    if metrics.get("judge/abstained") == 1:
        return "the judge gave no rollout a score"
    if metrics.get("groups/uniform_fraction") == 1:
        return EQUAL_REWARDS
    return "no rollout had an advantage"


def _log(path: Path) -> FollowedLog[list[JsonRow]]:
    return follow(path, list[JsonRow])
