"""Spans: the records of calls, refusals, rewards and errors of a run.

The `gen_ai_` columns are OpenTelemetry's attributes of that name.
"""

import json
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ratchet.adapters.calls import Begun, CallId, Completion, RefusedCall
from ratchet.adapters.dialects.instructions import instruction_of
from ratchet.adapters.player_protocol import Failure, RolloutEnd
from ratchet.adapters.redaction import redact
from ratchet.adapters.rewards import Reward, RewardError, check_reward, check_roles
from ratchet.tasks.storage.files import read_footer
from ratchet.tasks.storage.names import parse_rollout

Span = dict[str, Any]
"""Row of SPAN_SCHEMA; missing columns are null. JSON columns hold plain values, times datetimes.

Token ids and log-probabilities are arrays of the standard library.
"""

LLM, REWARD, CREDIT, ERROR = "llm", "reward", "credit", "error"
BEGUN, REFUSED = "begun", "refused"
SPAN_KINDS = (LLM, REWARD, CREDIT, ERROR, BEGUN, REFUSED)
OURS, OTHER = "ratchet", "other"

ERROR_PLACE = r" at \S+:\d+$"
"""End of an error's message that says at which line of the agent's code the error came."""

COMPLETION = (
    *("started", "ended", "request_sha", "recalled", "policy_version", "renderer", "tokenizer_sha"),
    *("prompt_token_ids", "response_token_ids", "logprobs", "kept_tokens", "kept_call", "kept_how"),
)
"""Columns of a call that have the name of what they hold of a Completion."""
SAMPLING = ("max_tokens", "temperature", "top_p", "top_k")
TIMES = ("started", "ended")


ATTEMPT = ("rollout_id", "attempt")
ROLE_CALL = (*ATTEMPT, "role", "call")
IDENTITY = (*ROLE_CALL, "kind", "started")
REQUEST = ("rollout_id", "role", "request_sha", "policy_version")
SEEDED = (*REQUEST, "gen_ai_request_seed")

USED, SET_ASIDE, UNANSWERED = "used", "set aside", "not answered"
TOKENS_KEY = "ratchet.tokens"
"""Key of a sealed batch's footer: the tokens of its calls."""
USES = {REWARD: USED, ERROR: "failed", LLM: "interrupted"}
"""Kind of the end of an attempt, LLM without one → use of its calls."""

CallTokens = dict[tuple[str | None, str, str, bool], Counter[str]]
"""Run that asked, role, use and whether the service computed it → `calls`, the tokens `prefill`,
`cached` and `sampled`, and the `cost` of helpers in US dollars, if it is known. Those of UNANSWERED
calls are an upper bound: the service may have computed none of them."""

SECRET = re.compile(r"api[-_]?key|secret|password|authorization|credential|access[-_]token", re.I)


def call_span(completion: Completion) -> Span:
    call, request, sampling = completion.id, completion.request, completion.sampling
    reused, (asked, answered) = completion.kept_call, completion.token_counts
    said = instruction_of(request) if completion.usage is None else ""
    return {
        **_of_call(call, LLM),
        **{name: getattr(completion, name) for name in COMPLETION},
        "status": "ok",
        "gen_ai_operation_name": "chat",
        "gen_ai_provider_name": OURS if completion.usage is None else OTHER,
        "gen_ai_request_model": request.model,
        **{f"gen_ai_request_{n}": getattr(sampling, n) for n in SAMPLING if sampling is not None},
        "gen_ai_request_seed": completion.seed,
        "gen_ai_response_id": completion.response_id,
        "gen_ai_response_finish_reasons": [completion.finish_reason],
        "gen_ai_usage_input_tokens": asked,
        "gen_ai_usage_output_tokens": answered,
        "messages": list(request.messages),
        "reply": completion.message,
        "tools": list(request.tools),
        "attributes": without_secrets({"request": dict(request.fields)})
        | ({"dialect": request.dialect} if request.dialect else {})
        | ({"instructions": said} if said else {})
        | ({"left_out_tools": [*request.left_out]} if request.left_out else {})
        | dict(completion.outcomes)
        | ({"cached_tokens": completion.cached_tokens} if completion.cached_tokens else {})
        | ({"cut_tokens": completion.cut_tokens} if completion.cut_tokens else {})
        | ({} if completion.usage is None else {"cost": completion.usage.cost}),
        "prompt_token_ids": array("i", completion.prompt_token_ids),
        "response_token_ids": array("i", completion.response_token_ids),
        "logprobs": array("d", completion.logprobs),
        "kept_span_id": None if reused is None else _call_id(replace(call, number=reused)),
    }


def begun_span(begun: Begun) -> Span:
    return {
        **_of_call(begun.id, BEGUN),
        "started": begun.started,
        "gen_ai_request_max_tokens": begun.max_tokens,
        "gen_ai_request_seed": begun.seed,
        "gen_ai_usage_input_tokens": begun.prompt_tokens,
        "request_sha": begun.request_sha,
        "policy_version": begun.policy_version,
    }


def refused_span(refused: RefusedCall) -> Span:
    """Record a call that was refused. Nothing was sampled, and nothing reads it but reports.

    `call` counts the refused calls of the role; answered calls have numbers of their own.
    """
    call = CallId(refused.rollout_id, refused.attempt, refused.role, refused.number)
    return {
        **_of_call(call, REFUSED),
        "started": refused.started,
        "ended": refused.ended,
        "status": "error",
        "error_type": refused.code,
        "error_message": refused.message,
        "attributes": {"status": refused.status},
    }


def rows_of(spans: Sequence[Span]) -> list[Span]:
    """Return the rows of a sealed batch, by the spans of its journal.

    Records of begun calls that were answered are dropped: the remaining ones were lost.
    """
    answered = {_values(span, ROLE_CALL) for span in spans if span["kind"] == LLM}
    return [
        span for span in spans if span["kind"] != BEGUN or _values(span, ROLE_CALL) not in answered
    ]


def count_tokens(spans: Sequence[Span], aside: Sequence[Span] = ()) -> CallTokens:
    """Count the tokens of the calls of whole rollouts, by the rows of a batch.

    `aside` are rows that were set aside when the rollouts were played anew. What was given again
    from the journal was paid for where it was sampled. An unanswered call has the tokens of the
    call that repeated it, or else as many as it could have sampled.
    """
    known = {_values(span, IDENTITY) for span in spans}
    apart = [span for span in aside if _values(span, IDENTITY) not in known]
    calls = [span for span in (*spans, *apart) if span["kind"] == LLM]
    given_again = {_values(call, REQUEST) for call in calls if call.get("recalled")}
    ends = {_values(span, ATTEMPT): span["kind"] for span in spans if span["kind"] in USES}
    most: dict[tuple[Any, ...], int] = {}
    for call in calls:
        asked = _values(call, SEEDED)
        most[asked] = max(most.get(asked, 0), _count_sampled(call))
    sums: CallTokens = defaultdict(Counter)
    for span in (*spans, *apart):
        if span["kind"] == BEGUN:
            use, limit = UNANSWERED, span.get("gen_ai_request_max_tokens") or 0
            sampled = most.get(_values(span, SEEDED), limit)
        elif span["kind"] == LLM and not span.get("recalled"):
            use, sampled = USES[ends.get(_values(span, ATTEMPT), LLM)], _count_sampled(span)
            if _values(span, IDENTITY) not in known:
                use = SET_ASIDE
            elif _values(span, REQUEST) in given_again:
                use = USED
        else:
            continue
        attributes = span.get("attributes") or {}
        cached, cost = attributes.get("cached_tokens", 0), attributes.get("cost")
        prefill = (span.get("gen_ai_usage_input_tokens") or 0) - cached
        own = sums[span.get("run_id"), span["role"], use, span.get("gen_ai_provider_name") != OTHER]
        own.update(calls=1, prefill=prefill, cached=cached, sampled=sampled)
        own.update({} if cost is None else {"cost": cost})
    return sums


def footer_of(tokens: CallTokens) -> dict[str, str]:
    """Return the metadata of a sealed batch."""
    return {TOKENS_KEY: json.dumps([*tokens.items()])}


def read_tokens(sealed: Path) -> CallTokens:
    """Read the tokens of a sealed batch's calls; Damaged if the file has changed since."""
    return {tuple(key): Counter(sums) for key, sums in read_footer(sealed, TOKENS_KEY)}


def _count_sampled(call: Span) -> int:
    cut = (call.get("attributes") or {}).get("cut_tokens", 0)
    return (call.get("gen_ai_usage_output_tokens") or 0) + cut


def _values(span: Span, names: Sequence[str]) -> tuple[Any, ...]:
    return tuple(span.get(name) for name in names)


def scored_names(rollouts: Iterable[str], verdict: Reward) -> dict[str, Sequence[int]]:
    """Return what a judge may score, its `rollouts`, as roles with calls.

    A rollout's score may be a list: its parts are numbered as calls are.
    """
    return {name: range(len(verdict.calls.get(name, ()))) for name in rollouts}


def end_spans(
    end: RolloutEnd,
    now: datetime,
    rewarded: Mapping[str, float] = MappingProxyType({}),
    *,
    judged: bool = False,
) -> list[Span]:
    """Return the spans of an end, in the order of recording.

    The last is the reward or the error: a failed rollout has no reward, which is not a reward of 0.
    Before a reward come the credits of roles and of their calls. They count only with it, so a
    rollout is never half rewarded. A reward for an unknown role or call is an error. So is a
    missing reward, unless the rollout is `judged`. An error of `rewarded` is one with that reward.
    """
    started, outcome = now - timedelta(seconds=end.seconds), end.outcome

    def span(kind: str, of: str = "", **columns: object) -> Span:
        return {
            **_of_rollout(end.rollout_id, end.attempt),
            "span_id": f"{end.rollout_id}.{end.attempt}.{of}{kind}",
            "kind": kind,
            "started": started,
            "ended": now,
            "status": "ok",
            **columns,
        }

    if isinstance(outcome, Reward):
        try:
            if not judged:
                check_reward(outcome)
            check_roles(outcome, {role: len(numbers) for role, numbers in end.calls.items()})
        except RewardError as error:
            outcome = Failure(type(error).__name__, str(error))
    if isinstance(outcome, Failure):
        error = {"error_type": outcome.kind, "error_message": outcome.message}
        if outcome.kind in rewarded:
            reward = rewarded[outcome.kind]
            return [span(REWARD, reward_name=REWARD, reward=reward, **error)]
        return [span(ERROR, status="error", **error)]
    credits = [
        span(CREDIT, f"{role}.", role=role, call=None, reward_name="role", reward=reward)
        for role, reward in outcome.roles.items()
    ] + [
        span(CREDIT, f"{role}.{call}.", role=role, call=call, reward_name="call", reward=reward)
        for role, rewards in outcome.calls.items()
        for call, reward in zip(sorted(end.calls[role]), rewards, strict=True)
    ]
    return [*credits, span(REWARD, reward_name=REWARD, reward=outcome.value)]


def span_identity(span: Span) -> tuple[Any, ...]:
    """Return the key of a span; no two spans of a run share one."""
    return _values(span, ("rollout_id", "attempt", "kind", "role", "call", "reward_name"))


def cause_of(error: str) -> str:
    """Return what an error, `TYPE: MESSAGE`, shares with errors of its type at the same place."""
    place = re.search(ERROR_PLACE, error)
    return f"{error.partition(':')[0]}{place[0]}" if place else error


def without_secrets(value: Any) -> Any:
    """Replace by `***` every value whose name says that it is a secret, and what `redact` hides."""
    if isinstance(value, list):
        return [without_secrets(item) for item in value]
    if not isinstance(value, dict):
        return redact(value) if isinstance(value, str) else value
    return {k: "***" if SECRET.search(k) else without_secrets(v) for k, v in value.items()}


def _of_rollout(rollout_id: str, attempt: int) -> Span:
    named = parse_rollout(rollout_id)
    return {
        "shard": named.shard,
        "step": named.step,
        "group_id": named.group,
        "rollout_id": rollout_id,
        "attempt": attempt,
    }


def _of_call(call: CallId, kind: str) -> Span:
    return {
        **_of_rollout(call.rollout_id, call.attempt),
        "role": call.role,
        "call": call.number,
        "span_id": _call_id(call) if kind == LLM else f"{_call_id(call)}.{kind}",
        "kind": kind,
    }


def _call_id(call: CallId) -> str:
    return f"{call.rollout_id}.{call.attempt}.{call.role}.{call.number}"
