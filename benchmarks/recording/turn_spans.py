"""Spans of made-up turns."""

from array import array
from datetime import UTC, datetime

from benchmarks.peers.turns import Turn
from ratchet.tasks.recording.spans import Span


def make_span(turn: Turn) -> Span:
    """Make the span of a turn as the door does, but without messages, which the peer lacks too."""
    rollout, now = f"train-00000-{turn.rollout:04d}-00", datetime.now(UTC)
    return {
        "run_id": "durability",
        "shard": "train-00000",
        "step": 0,
        "group_id": rollout[:-3],
        "rollout_id": rollout,
        "attempt": 0,
        "role": "policy",
        "call": turn.number,
        "span_id": f"{rollout}.0.policy.{turn.number}",
        "kind": "llm",
        "started": now,
        "ended": now,
        "gen_ai_request_model": "policy",
        "gen_ai_response_id": f"{turn.rollout}-{turn.number}",
        "policy_version": "00000",
        "prompt_token_ids": array("i", turn.prompt),
        "response_token_ids": array("i", turn.answer),
        "logprobs": array("d", turn.logprobs),
        "kept_tokens": 0,
    }
