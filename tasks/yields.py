"""rollouts → what the run decides by: how much a step yields, and how many of it failed."""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from adapters.errors import UserError, counted
from tasks.recording.spans import ERROR, REWARD, cause_of
from tasks.storage.checksums import verified
from tasks.storage.files import is_written
from tasks.storage.names import BASELINE, parse_rollout
from tasks.storage.run_folder import RunFolder
from tasks.storage.tables import query_beside, read, select

QUERY = query_beside(__file__)

ENDS = ("rollout_id", "shard", "kind", "error_type", "error_message")
"""Columns of spans that say how rollouts have ended."""

ANSWERED = """
select exists (from parquet_rows($spans) where len(response_token_ids) > 0) as answered
"""
"""Query of whether a policy has answered a call."""

CALLED = """
select exists (from parquet_rows($spans) where kind = 'llm') as called
"""
"""Query of whether any model has answered a call."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Yield:
    """Yield of rollouts: groups whose rewards are not all equal, and calls."""

    teaching_groups: int
    calls: int


def measure_yield(spans: Sequence[Path]) -> Yield:
    """Measure what sealed batches have yielded."""
    (row,) = select(QUERY, spans=[verified(path) for path in spans]).to_pylist()
    return Yield(**row)


class StepStopped(UserError):
    """Stop at a step, or an evaluation, of which too few rollouts have a reward."""

    status = 1


@dataclass(frozen=True)
class Ends:
    """Ends of the rollouts of sealed batches: how many had no error, and the errors of the others.

    Baselines and stragglers do not count.
    """

    shard: str
    ended: int
    errors: Sequence[str]

    @classmethod
    def of(cls, spans: Sequence[Path]) -> Self:
        rows = [row for path in spans for row in read(path, ENDS).to_pylist()]
        played = [row for row in rows if parse_rollout(row["rollout_id"]).split != BASELINE]
        ended = {row["rollout_id"] for row in played if row["kind"] == REWARD}
        failed = {row["rollout_id"]: row for row in played if row["kind"] == ERROR}
        errors = [
            f"{row['error_type']}: {row['error_message']}"
            for rollout, row in failed.items()
            if rollout not in ended
        ]
        return cls(played[0]["shard"] if played else "the step", len(ended), errors)

    @property
    def failed(self) -> str:
        """Number of those that failed, in words."""
        rollouts = counted(self.ended + len(self.errors), "rollout")
        return f"{len(self.errors)} of the {rollouts} of {self.shard} failed"

    @property
    def commonest(self) -> str:
        """The commonest error, by its cause, in a sentence."""
        causes: dict[str, Counter[str]] = defaultdict(Counter)
        for error in self.errors:
            causes[cause_of(error)][error] += 1
        errors = max(causes.values(), key=Counter.total, default=Counter[str]())
        said = [f"{error} ({errors.total()} of them)" for error, _ in errors.most_common(1)]
        return f"The commonest error: {''.join(said) or 'none'}."


def check_rewards(spans: Sequence[Path], most_failed: float) -> None:
    """Raise StepStopped if no rollout of a step has a reward, or a larger share than this failed.

    `spans` are the sealed batches of the step.
    """
    ends = Ends.of(spans)
    if ends.ended and len(ends.errors) <= most_failed * (ends.ended + len(ends.errors)):
        return
    raise StepStopped(
        f"{ends.failed}, and {ends.ended} earned a reward, so the run is stopped before this step "
        f"is trained. {ends.commonest} Mend the agent, or give a larger rollouts.most_failed, and "
        "resume the run: the step is played anew"
    )


def check_step(spans: Sequence[Path], most_failed: float) -> None:
    """Raise StepStopped if `check_rewards` does, or if no call of a step has been answered."""
    check_rewards(spans, most_failed)
    (row,) = select(ANSWERED, spans=[verified(path) for path in spans]).to_pylist()
    if not row["answered"]:
        raise StepStopped(
            f"the rollouts of {spans[0].stem} have rewards, and none has a call that a policy "
            "answered, so the run is stopped before this step is trained. Have the agent ask the "
            "base_url that it is given, by the api_key, and resume the run: the step is played anew"
        )


def check_held_out(spans: Sequence[Path]) -> None:
    """Raise StepStopped if held-out rollouts have nothing to score; say how many failed.

    There is nothing if all have failed, or if no model has answered a call of any.
    """
    ends = Ends.of(spans)
    (row,) = select(CALLED, spans=[verified(path) for path in spans]).to_pylist()
    if not ends.ended or not row["called"]:
        fact = (
            f"the rollouts of {ends.shard} have ended, and none has a call that a model answered"
            if ends.ended
            else f"{ends.failed}. {ends.commonest[:-1]}"
        )
        raise StepStopped(
            f"{fact}. So there is nothing to score, and no evaluation is recorded. Mend the agent, "
            "and resume the run, or repeat the command: these rollouts are played anew"
        )
    if ends.errors:
        log.warning("%s, and the evaluation is of the others. %s", ends.failed, ends.commonest)


def reopen_stopped(run: RunFolder, shard: str, check: Callable[[Sequence[Path]], None]) -> None:
    """Have the batches of a shard played anew if this check had stopped the run at its step."""
    batches = run.journalled(shard)
    spans = [run.spans(batch) for batch in batches]
    if not batches or not all(map(is_written, spans)):
        return
    try:
        check(spans)
    except StepStopped as stopped:
        log.warning("%s", stopped)
        for batch in batches:
            run.set_aside(batch)
