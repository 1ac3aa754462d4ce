"""spans → rollouts, as a batch's journal has them: no recorded call need be sampled again."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ratchet.adapters.calls import (
    CallId,
    Completion,
    Example,
    RefusedCall,
    Request,
    Sampling,
    Usage,
)
from ratchet.adapters.errors import did_you_mean
from ratchet.adapters.rewards import MEASURE
from ratchet.tasks.recording.journal import read_journal
from ratchet.tasks.recording.spans import (
    COMPLETION,
    CREDIT,
    ERROR,
    LLM,
    OURS,
    REFUSED,
    REWARD,
    SAMPLING,
    Span,
)
from ratchet.tasks.storage.names import is_judging, parse_rollout
from ratchet.tasks.storage.run_folder import RunError, RunFolder


@dataclass(frozen=True)
class RecordedRollout:
    """The last attempt at a rollout that has ended. `failures` counts its failures before.

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
    """Say how a rollout has ended, by the spans of its end; the last is its error or reward.

    A judge's rollout has ended with a verdict: its scores by rollout, and measures.
    """
    *credits, last = spans
    if last["kind"] == ERROR:
        return f"{last['error_type']}: {last['error_message']}"
    if is_judging(parse_rollout(last["rollout_id"]).split):
        return _describe_verdict(credits)
    by = f", for {last['error_type']}" if last.get("error_type") else ""
    return "no reward" if last["reward"] is None else f"reward {last['reward']:g}{by}"


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


def recorded_calls(spans: Iterable[Span]) -> dict[str, list[Completion]]:
    """Return each rollout's answered calls since its last failure, from a journal's spans in order.

    A call of a later attempt replaces the call of the same number. If the two requests differ, the
    agent took another course, and the earlier attempt's further calls are dropped.
    """
    answered: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if span["kind"] == LLM:
            answered[span["rollout_id"]].append(span)
        elif span["kind"] == ERROR:
            answered.pop(span["rollout_id"], None)
    return {rollout: _merged(calls) for rollout, calls in answered.items()}


def _merged(spans: list[Span]) -> list[Completion]:
    calls: dict[tuple[str, int], Span] = {}
    for span in sorted(spans, key=lambda span: (span["attempt"], span["role"], span["call"])):
        role, call = span["role"], span["call"]
        before = calls.get((role, call))
        if before is not None and before["request_sha"] != span["request_sha"]:
            calls = {key: of for key, of in calls.items() if key[0] != role or key[1] < call}
        calls[role, call] = span
    return [_completion(span) for span in calls.values()]


def _completion(span: Span) -> Completion:
    """Rebuild a completion from its span, as far as an answer needs it."""
    usage = None
    if span["gen_ai_provider_name"] != OURS:
        counted = span["gen_ai_usage_input_tokens"], span["gen_ai_usage_output_tokens"]
        usage = Usage(*counted, cost=span["attributes"]["cost"])
    return Completion(
        id=CallId(span["rollout_id"], span["attempt"], span["role"], span["call"]),
        response_id=span["gen_ai_response_id"],
        request=Request(
            span["gen_ai_request_model"],
            span["messages"],
            span["tools"],
            None,
            [],
            span["attributes"].get("request", {}),
        ),
        sampling=None if usage else Sampling(*(span[f"gen_ai_request_{n}"] for n in SAMPLING)),
        seed=span["gen_ai_request_seed"],
        finish_reason=span["gen_ai_response_finish_reasons"][0],
        message=span["reply"],
        usage=usage,
        **{field: span[field] for field in COMPLETION},
    )
