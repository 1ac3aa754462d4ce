"""The peer of `benchmarks.durability`, for the environment of agentlightning 0.3.0.

Each line on stdin starts a round: one coroutine per rollout adds the spans of all turns to a new
in-memory store. The output is the seconds for making the `Span` objects, as the tracer does for
every call, and the seconds for `add_span`.
"""

import asyncio
import json
import sys
import time
from collections import defaultdict
from typing import Any

from agentlightning.store.memory import InMemoryLightningStore  # pyright: ignore
from agentlightning.types import Span  # pyright: ignore

from benchmarks.turns import Turn, turns


def span_of(turn: Turn, rollout: Any) -> Any:
    """Make a span with the attributes that agentlightning's triplet adapter reads."""
    attributes = {
        "gen_ai.request.model": "policy",
        "gen_ai.response.id": f"{turn.rollout}-{turn.number}",
        "prompt_token_ids": turn.prompt,
        "response_token_ids": turn.answer,
        "logprobs": json.dumps(turn.logprobs),
    }
    return Span.from_attributes(
        rollout_id=rollout.rollout_id,
        attempt_id=rollout.attempt.attempt_id,
        sequence_id=turn.number + 1,
        name="openai.chat.completion",
        attributes=attributes,
    )


def clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


async def round_of(calls: list[Turn]) -> list[list[float]]:
    """Return the wall and processor seconds for making the spans, and for adding them."""
    store = InMemoryLightningStore()
    rollouts = {}
    for turn in calls:
        if turn.rollout not in rollouts:
            rollouts[turn.rollout] = await store.start_rollout(input={})
    started = clocks()
    spans = defaultdict(list)
    for turn in calls:
        spans[turn.rollout].append(span_of(turn, rollouts[turn.rollout]))
    made = clocks()

    async def add(ours: list[Any]) -> None:
        for span in ours:
            await store.add_span(span)

    await asyncio.gather(*map(add, spans.values()))
    added = clocks()
    for number, rollout in rollouts.items():
        kept = await store.query_spans(rollout.rollout_id)
        assert len(kept) == len(spans[number]), "a span is missing"
    return [
        [b - a for a, b in zip(*pair, strict=True)] for pair in ((started, made), (made, added))
    ]


def main() -> None:
    calls = list(turns(int(sys.argv[1])))
    for _ in sys.stdin:
        print(json.dumps(asyncio.run(round_of(calls))), flush=True)


if __name__ == "__main__":
    main()
