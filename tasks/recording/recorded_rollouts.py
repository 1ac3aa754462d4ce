"""A run's journals → one rollout as it was recorded: its example, its calls and its end."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from adapters.calls import Completion, Example, RefusedCall
from adapters.errors import did_you_mean
from tasks.recording.journal import read_journal
from tasks.recording.recorded_calls import recorded_calls
from tasks.recording.spans import ERROR, REFUSED, REWARD, Span
from tasks.storage.names import parse_rollout
from tasks.storage.run_folder import RunError, RunFolder


@dataclass(frozen=True)
class RecordedRollout:
    """The last attempt at a rollout that has ended. `failures` is how often it had failed before.

    `refused` are the refused calls of that attempt, and `end` says how it ended.
    """

    id: str
    example: Example
    attempt: int
    failures: int
    calls: Sequence[Completion]
    refused: Sequence[RefusedCall]
    end: str


def describe_end(span: Span) -> str:
    """Say how a rollout has ended, by the last of its spans."""
    if span["kind"] == ERROR:
        return f"{span['error_type']}: {span['error_message']}"
    return "no reward" if span["reward"] is None else f"reward {span['reward']:g}"


def find_rollout(run: RunFolder, name: str) -> RecordedRollout:
    """Read a rollout of a run; RunError if it is not there, or has not ended."""
    try:
        shard = parse_rollout(name).shard
    except ValueError as error:
        raise RunError(f"{error}; `ratchet sql` lists them: from rollouts") from error
    known: set[str] = set()
    for batch in run.journalled(shard):
        spans = read_journal(run.journal(batch))
        if own := [span for span in spans if span["rollout_id"] == name]:
            return _read(name, own)
        known |= {span["rollout_id"] for span in spans}
    near = did_you_mean(name, sorted(known)) if known else f"; it has played no {shard}"
    raise RunError(f"{run.path} has no rollout {name}{near}")


def _read(name: str, spans: Sequence[Span]) -> RecordedRollout:
    ends = [span for span in spans if span["kind"] in (ERROR, REWARD)]
    if not ends:
        raise RunError(f"{name} has not ended, so that nothing is known to debug; resume the run")
    last = ends[-1]
    before = [span for span in spans if span is not last]
    return RecordedRollout(
        name,
        last["attributes"]["example"],
        last["attempt"],
        sum(span["kind"] == ERROR for span in before),
        recorded_calls(before).get(name, []),
        [_refused(span) for span in _of_attempt(before, last["attempt"])],
        describe_end(last),
    )


def _of_attempt(spans: Iterable[Span], attempt: int) -> list[Span]:
    return [span for span in spans if span["kind"] == REFUSED and span["attempt"] == attempt]


def _refused(span: Span) -> RefusedCall:
    return RefusedCall(
        span["rollout_id"],
        span["attempt"],
        span["role"],
        span["call"],
        span["attributes"]["status"],
        span["error_type"],
        span["error_message"],
        span["started"],
        span["ended"],
    )
