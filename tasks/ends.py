"""Ends of rollouts: whether a step is trained or scored, and which rollouts are played again."""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ratchet.adapters.errors import UserError, counted
from ratchet.tasks.recording.journal import copy_without, read_journal
from ratchet.tasks.recording.spans import ERROR, LLM, REWARD, cause_of
from ratchet.tasks.storage.files import appearing, is_written
from ratchet.tasks.storage.run_folder import RunFolder
from ratchet.tasks.storage.tables import flat_values, read_table
from ratchet.tasks.trajectories import ANSWER

END_COLUMNS = ("rollout_id", "shard", "kind", "role", "error_type", "error_message")
"""Columns of spans that say how rollouts have ended, and whose calls were answered."""

log = logging.getLogger(__name__)


Check = Callable[[Sequence[Path]], str | None]
"""Raises StepStopped for the sealed batches of a shard, or returns a warning if there is one."""


class StepStopped(UserError):
    """Stop at a step, or an evaluation, whose rollouts have too few rewards."""

    status = 1


@dataclass(frozen=True)
class Ends:
    """Ends of the rollouts of sealed batches: how many had no error, and the errors of the others.

    `called` are the roles that a model has answered in rollouts without an error, and `answered` is
    whether a policy has answered a call.
    """

    shard: str
    ended: int
    errors: Sequence[str]
    called: Set[str]
    answered: bool

    @classmethod
    def of(cls, spans: Sequence[Path]) -> Self:
        rows, answered = list[dict[str, Any]](), False
        for path in spans:
            table = read_table(path, [*END_COLUMNS, ANSWER])
            answered |= len(flat_values(table[ANSWER])) > 0
            rows += table.select(END_COLUMNS).to_pylist()
        ended = {row["rollout_id"] for row in rows if row["kind"] == REWARD}
        failed = {row["rollout_id"]: row for row in rows if row["kind"] == ERROR}
        errors = [
            f"{row['error_type']}: {row['error_message']}"
            for rollout, row in failed.items()
            if rollout not in ended
        ]
        return cls(
            rows[0]["shard"] if rows else "the step",
            len(ended),
            errors,
            called={r["role"] for r in rows if r["kind"] == LLM and r["rollout_id"] in ended},
            answered=answered,
        )

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
    """Raise StepStopped if no rollout of a step has a reward, or if too large a share failed.

    `spans` are the sealed batches of the step.
    """
    _check_rewarded(Ends.of(spans), most_failed)


def _check_rewarded(ends: Ends, most_failed: float) -> None:
    if ends.ended and len(ends.errors) <= most_failed * (ends.ended + len(ends.errors)):
        return
    raise StepStopped(
        f"{ends.failed}, and {ends.ended} earned a reward, so the run is stopped before this step "
        f"is trained. {ends.commonest} Mend that, and resume the run: the step is played anew"
    )


def check_step(spans: Sequence[Path], most_failed: float) -> None:
    """Raise StepStopped if `check_rewards` does, or if no call of a step has been answered."""
    ends = Ends.of(spans)
    _check_rewarded(ends, most_failed)
    if not ends.answered:
        raise StepStopped(
            f"the rollouts of {spans[0].stem} have rewards, and none has a call that a policy "
            "answered, so the run is stopped before this step is trained. Have the agent ask the "
            "base_url that it is given, by the api_key, and resume the run: the step is played anew"
        )


def check_held_out(spans: Sequence[Path], roles: Collection[str], *, goes_on: bool) -> str | None:
    """Raise StepStopped if held-out rollouts have nothing to score; return how many failed.

    Rollouts have nothing to score if all have failed, unless a training `goes_on` without a score,
    or if no call was answered of the `roles` whose answers are scored.
    """
    ends = Ends.of(spans)
    if not ends.called.isdisjoint(roles) or (goes_on and not ends.ended):
        remedy = "`ratchet evaluate` of this checkpoint with --redo-failed plays these again"
        said = f"{ends.failed}, and the evaluation is of the others, if any. {ends.commonest}"
        return f"{said} Mend the agent: {remedy}" if ends.errors else None
    unasked = "have ended, and none has a call of the evaluated model that was answered"
    fact = f"the rollouts of {ends.shard} {unasked}" if ends.ended else ends.failed
    commonest = f" {ends.commonest[:-1]}." if ends.errors else ""
    raise StepStopped(
        f"{fact}.{commonest} So there is nothing to score, and no evaluation is recorded. Mend the "
        "agent, and resume the run, or repeat the command: these rollouts are played anew"
    )


def reopen_stopped(run: RunFolder, shard: str, check: Check) -> None:
    """Have the batches of a shard played anew if this check had stopped the run at its step."""
    batches = run.journalled(shard)
    spans = [run.spans(batch) for batch in batches]
    if not batches or not all(map(is_written, spans)):
        return
    try:
        check(spans)
    except StepStopped:
        log.warning("%s, at which the run had stopped, is played anew", shard)
        for batch in batches:
            run.set_aside(batch)


Failed = Mapping[str, Collection[str]]
"""Batch → its rollouts that have failed."""


def find_failed(run: RunFolder, shard: str) -> tuple[Failed, bool]:
    """Find the rollouts of a shard that have failed so far; return whether another has ended too.

    Each rollout has one attempt, as held-out rollouts have.
    """
    failed, ended = dict[str, set[str]](), False
    for batch in run.journalled(shard):
        kinds = [(span["kind"], span["rollout_id"]) for span in read_journal(run.journal(batch))]
        ended |= any(kind == REWARD for kind, _ in kinds)
        if own := {rollout for kind, rollout in kinds if kind == ERROR}:
            failed[batch] = own
    return failed, ended


def reopen_failed(run: RunFolder, failed: Failed) -> None:
    """Have failed rollouts played again as if for the first time; what others recorded stays."""
    for batch, rollouts in failed.items():
        with appearing(journal := run.journal(batch)) as left:
            copy_without(journal, rollouts, left)
            run.reopen(batch)


def reopen_unanswered(run: RunFolder, shard: str) -> None:
    """Have failed rollouts of a shard played again if the rest was cut off, and none has ended."""
    if any(not is_written(run.spans(batch)) for batch in run.journalled(shard)):
        failed, ended = find_failed(run, shard)
        if not ended:
            reopen_failed(run, failed)
