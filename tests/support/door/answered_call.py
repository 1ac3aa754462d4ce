"""A call that was answered, as the kept calls of its role remember it."""

from collections.abc import Sequence
from datetime import UTC, datetime

from ratchet.adapters.calls import POLICY, CallId, Completion, Message, Request, Tool

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def answered_call(
    messages: Sequence[Message],
    tools: Sequence[Tool],
    reply: Message,
    prompt_token_ids: Sequence[int],
    response_token_ids: Sequence[int],
    number: int = 0,
) -> Completion:
    return Completion(
        id=CallId("r", 0, POLICY, number),
        response_id="",
        request=Request("m", messages, tools, None, [], {}),
        seed=0,
        finish_reason="stop",
        message=reply,
        policy_version="v0",
        started=NOON,
        ended=NOON,
        prompt_token_ids=prompt_token_ids,
        response_token_ids=response_token_ids,
    )
