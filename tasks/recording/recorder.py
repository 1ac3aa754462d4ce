"""Rollouts as a batch's journal has them: what the door reports becomes spans, and is read again.

An interrupted rollout need not sample its recorded calls again.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from ratchet.adapters.calls import (
    Begun,
    CallId,
    Completion,
    Example,
    RefusedCall,
    Request,
    Sampling,
    Usage,
)
from ratchet.adapters.door.batches import DueRollout
from ratchet.adapters.door.role_calls import SAMPLER_REFUSED, SAMPLER_UNAVAILABLE
from ratchet.adapters.errors import ServiceError, did_you_mean
from ratchet.adapters.player_protocol import RolloutEnd
from ratchet.adapters.rewards import MEASURE, Reward
from ratchet.adapters.tinker.service import Lifeline, ServiceFailed, ServiceRefused
from ratchet.tasks.recording.journal import Journal, read_journal
from ratchet.tasks.recording.spans import (
    CREDIT,
    ERROR,
    LLM,
    OURS,
    REFUSED,
    REWARD,
    SAMPLING,
    Span,
    begun_span,
    call_span,
    end_spans,
    refused_span,
    scored_names,
)
from ratchet.tasks.storage.names import ShardBatch, is_judging, parse_batch, parse_rollout
from ratchet.tasks.storage.run_folder import RunError, RunFolder


class JournalRecorder:
    """Recorder of a batch: what the door reports becomes spans in the batch's journal.

    `judged` rollouts need no reward from the agent.
    """

    def __init__(
        self,
        run: RunFolder,
        lifeline: Lifeline,
        batch: ShardBatch,
        shard: Path,
        journal: Journal,
        *,
        judged: bool = False,
    ) -> None:
        self.fault: ServiceError | None = None
        """Why the service answers no call of the batch; then nothing more is recorded."""
        self._run = run
        self._lifeline = lifeline
        self._attempts, self._rewarded = batch.attempts, batch.rewarded
        self._judges = is_judging(parse_batch(batch.name).split)
        self._unrewarded = judged or self._judges  # a judge may abstain
        self._journal = journal
        self._examples = dict(batch.examples(shard))
        self._left: dict[str, DueRollout] = {}
        self._answered = False
        self._held: list[RolloutEnd] = []
        self.due()

    @property
    def finished(self) -> bool:
        """Whether every rollout has ended."""
        return not self._left

    @property
    def stuck(self) -> bool:
        """Whether ends wait for an answer of the service before they are recorded."""
        return bool(self._held)

    def due(self) -> tuple[int, Sequence[DueRollout]]:
        """Read the journal: the next attempt's number, and the rollouts that have not ended.

        Raises UserError if the run has another owner by now.
        """
        self._run.check_owner()
        spans = read_journal(self._journal.path)
        rewarded = {span["rollout_id"] for span in spans if span["kind"] == REWARD}
        failures = Counter(span["rollout_id"] for span in spans if span["kind"] == ERROR)
        recorded = recorded_calls(spans)
        self._left = {
            name: DueRollout(name, row["example"], failures[name], recorded.get(name, ()))
            for name, row in self._examples.items()
            if name not in rewarded and failures[name] < self._attempts
        }
        self._answered |= any(span["kind"] == LLM for span in spans)
        attempt = max((span["attempt"] for span in spans), default=-1)
        return attempt + 1, [*self._left.values()]

    def begun(self, begun: Begun) -> None:
        self._journal.append_soon(self._of_run(begun_span(begun)))

    def refused(self, call: RefusedCall) -> None:
        self._journal.append_soon(self._of_run(refused_span(call)))

    async def answered(self, completion: Completion) -> None:
        """Record a call durably; ends that waited for the service to answer one count now."""
        await self._journal.append(self._of_run(call_span(completion)))
        self._answered |= completion.usage is None
        if self._answered:
            held, self._held = self._held, []
            for end in held:
                await self.ended(end)

    async def ended(self, end: RolloutEnd) -> None:
        """Record an end durably.

        EngineDied if that may be its cause; UserError if the run has another owner.
        """
        self._run.check_owner()
        self._lifeline.check()
        if self._waits_for_service(end):
            return
        row = self._examples[end.rollout_id]
        if self._judges and isinstance(end.outcome, Reward):
            scored = scored_names((one["id"] for one in row["example"]["rollouts"]), end.outcome)
            end = replace(end, calls={**end.calls, **scored})
        spans = end_spans(end, datetime.now(UTC), self._rewarded, judged=self._unrewarded)
        spans[-1]["attributes"] = {"example_id": row["example_id"], "example": row["example"]} | (
            {"calls_refused": end.refused} if end.refused else {}
        )
        failures = self._left[end.rollout_id].failures + (spans[-1]["kind"] == ERROR)
        if spans[-1]["kind"] == REWARD or failures >= self._attempts:
            del self._left[end.rollout_id]
        *first, last = spans
        for span in first:
            self._journal.append_soon(self._of_run(span))
        await self._journal.append(self._of_run(last))

    def _waits_for_service(self, end: RolloutEnd) -> bool:
        """Return whether an end cannot be recorded yet; raise a ServiceError if it never can be.

        The service may have refused only this request: it has if it answers another one.
        """
        refused = end.unanswered
        if refused is None or (refused.kind == SAMPLER_REFUSED and self._answered):
            return False
        passing = refused.kind == SAMPLER_UNAVAILABLE
        self.fault = (ServiceFailed if passing else ServiceRefused)(
            f"{refused.message.rstrip('.')}. No end of {end.rollout_id} is recorded, which had "
            "asked it: look at the service and at the recipe's model, then resume the run"
        )
        if refused.kind != SAMPLER_REFUSED:
            raise self.fault
        self._held.append(end)
        return True

    def _of_run(self, span: Span) -> Span:
        return {"run_id": self._run.name, **span}


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
        prompt_token_ids=span["prompt_token_ids"],
        kept_tokens=span["kept_tokens"],
        kept_call=span["kept_call"],
        kept_how=span["kept_how"],
        response_token_ids=span["response_token_ids"],
        logprobs=span["logprobs"],
        finish_reason=span["gen_ai_response_finish_reasons"][0],
        message=span["reply"],
        policy_version=span["policy_version"],
        renderer=span["renderer"],
        tokenizer_sha=span["tokenizer_sha"],
        started=span["started"],
        ended=span["ended"],
        request_sha=span["request_sha"],
        recalled=span["recalled"],
        usage=usage,
    )
