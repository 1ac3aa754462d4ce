"""A run's journals → one rollout as it was recorded: its example, its calls and its end."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from adapters.calls import Completion, Example, RefusedCall
from adapters.errors import did_you_mean
from adapters.rewards import MEASURE
from tasks.recording.journal import read_journal
from tasks.recording.recorded_calls import recorded_calls
from tasks.recording.spans import CREDIT, ERROR, REFUSED, REWARD, Span
from tasks.storage.names import is_judging, parse_rollout
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


def describe_end(spans: Sequence[Span]) -> str:
    """Say how a rollout has ended, by the spans of its end, of which the error or reward is last.

    A judge's has ended with a verdict: its scores by the ids of rollouts, and what it measured.
    """
    *credits, last = spans
    if last["kind"] == ERROR:
        return f"{last['error_type']}: {last['error_message']}"
    if is_judging(parse_rollout(last["rollout_id"]).split):
        return _describe_verdict(credits)
    return "no reward" if last["reward"] is None else f"reward {last['reward']:g}"


def _describe_verdict(credits: Sequence[Span]) -> str:
    whole: dict[str, str] = {}
    parts: dict[str, list[str]] = defaultdict(list)
    for span in credits:
        number = f"{span['reward'] + 0.0:g}"  # the sum makes 0 of -0
        if span["call"] is None:
            whole[span["role"]] = number
        else:
            parts[span["role"]].append(number)
    told = {
        role: f"{number} ({' + '.join(parts[role])})" if parts[role] else number
        for role, number in sorted(whole.items())
    }
    scores = [f"{role} {said}" for role, said in told.items() if not role.startswith(MEASURE)]
    measured = [
        f"{role.removeprefix(MEASURE)} {said}"
        for role, said in told.items()
        if role.startswith(MEASURE)
    ]
    verdict = f"scores {', '.join(scores)}" if scores else "no scores"
    return f"{verdict}; measured {', '.join(measured)}" if measured else verdict


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
        [_refused(span) for span in _of_attempt(before, last["attempt"], REFUSED)],
        describe_end([*_of_attempt(before, last["attempt"], CREDIT), last]),
    )


def _of_attempt(spans: Iterable[Span], attempt: int, kind: str) -> list[Span]:
    return [span for span in spans if span["kind"] == kind and span["attempt"] == attempt]


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
