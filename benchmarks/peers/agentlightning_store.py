"""The peer's half of `benchmarks.durability`, in the environment of agentlightning 0.3.0.

Each line on stdin starts a round: a new in-memory store gets the spans of all turns from as many
coroutines as there are rollouts. The answer is the seconds to make the `Span` objects, which
agentlightning's tracer has to make of every call, and the seconds of `add_span`.
"""

import asyncio
import json
import sys
import time
from collections import defaultdict
from typing import Any

from agentlightning.store.memory import InMemoryLightningStore  # pyright: ignore
from agentlightning.types import Span  # pyright: ignore

from benchmarks.peers.turns import Turn, make_turns


def make_span(turn: Turn, rollout: Any) -> Any:
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


def read_clocks() -> tuple[float, float]:
    """Return the wall and the processor time."""
    return time.perf_counter(), time.process_time()


async def run_round(calls: list[Turn]) -> list[list[float]]:
    """Return the wall and processor seconds to make the spans, and those to add them."""
    store = InMemoryLightningStore()
    rollouts = {}
    for turn in calls:
        if turn.rollout not in rollouts:
            rollouts[turn.rollout] = await store.start_rollout(input={})
    started = read_clocks()
    spans = defaultdict(list)
    for turn in calls:
        spans[turn.rollout].append(make_span(turn, rollouts[turn.rollout]))
    made = read_clocks()

    async def add(ours: list[Any]) -> None:
        for span in ours:
            await store.add_span(span)

    await asyncio.gather(*map(add, spans.values()))
    added = read_clocks()
    for number, rollout in rollouts.items():
        kept = await store.query_spans(rollout.rollout_id)
        assert len(kept) == len(spans[number]), "a span is missing"
    return [
        [b - a for a, b in zip(*pair, strict=True)] for pair in ((started, made), (made, added))
    ]


def main() -> None:
    """Run a round for every line on stdin."""
    calls = list(make_turns(int(sys.argv[1])))
    for _ in sys.stdin:
        print(json.dumps(asyncio.run(run_round(calls))), flush=True)


if __name__ == "__main__":
    main()
