"""rollouts → what the run decides by: how much a step yields, and how many of it failed."""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

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

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Yield:
    """Yield of rollouts: groups whose rewards are not all equal, calls, and sampled tokens."""

    teaching_groups: int
    calls: int
    sampled_tokens: int


def measure_yield(spans: Sequence[Path]) -> Yield:
    """Measure what sealed batches have yielded; recalled tokens do not count."""
    (row,) = select(QUERY, spans=[verified(path) for path in spans]).to_pylist()
    return Yield(**row)


class StepStopped(UserError):
    """Stop of a run at a step of which too few rollouts have a reward."""

    status = 1


def check_rewards(spans: Sequence[Path], most_failed: float) -> None:
    """Raise StepStopped if no rollout of a step has a reward, or a larger share than this failed.

    `spans` are the sealed batches of the step. Baselines and stragglers do not count.
    """
    rows = [row for path in spans for row in read(path, ENDS).to_pylist()]
    played = [row for row in rows if parse_rollout(row["rollout_id"]).split != BASELINE]
    rewarded = {row["rollout_id"] for row in played if row["kind"] == REWARD}
    errors = {row["rollout_id"]: row for row in played if row["kind"] == ERROR}
    failed = [row for rollout, row in errors.items() if rollout not in rewarded]
    if rewarded and len(failed) <= most_failed * (len(rewarded) + len(failed)):
        return
    causes: dict[str, Counter[str]] = defaultdict(Counter)
    for row in failed:
        error = f"{row['error_type']}: {row['error_message']}"
        causes[cause_of(error)][error] += 1
    commonest = max(causes.values(), key=Counter.total, default=Counter[str]())
    said = [f"{error} ({commonest.total()} of them)" for error, _ in commonest.most_common(1)]
    shard, *_ = (row["shard"] for row in played) if played else ("the step",)
    ended = counted(len(rewarded) + len(failed), "rollout")
    raise StepStopped(
        f"{len(failed)} of the {ended} of {shard} failed, and {len(rewarded)} earned a reward, so "
        f"the run is stopped before this step is trained. The commonest error: "
        f"{''.join(said) or 'none'}. Mend the agent, or give a larger rollouts.most_failed, and "
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
