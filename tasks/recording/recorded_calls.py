"""spans → recorded calls, which an interrupted rollout need not sample again."""

from collections import defaultdict
from collections.abc import Iterable

from adapters.calls import CallId, Completion, Request, Sampling, Usage
from tasks.recording.spans import ERROR, LLM, OURS, SAMPLING, Span


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
    usage = _usage(span)
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


def _usage(span: Span) -> Usage | None:
    if span["gen_ai_provider_name"] == OURS:
        return None
    counted = span["gen_ai_usage_input_tokens"], span["gen_ai_usage_output_tokens"]
    return Usage(*counted, cost=span["attributes"]["cost"])
