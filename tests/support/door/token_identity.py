"""What was sampled, compared with what would be trained, and how many turns kept their tokens."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from tests.support.door.recording_sampler import Calls, Sampled


def differences(trajectories: pa.Table, calls: Calls) -> list[str]:
    """List the trajectories that are not, token for token, what the sampler knows of their calls.

    The calls of a trajectory are found by their tokens alone, whatever the door says it has kept.
    Each call must lie whole in the trajectory, at its place, and nothing else may be trained. The
    tokens that a branch has in common with an earlier trajectory are trained in the earlier one.
    """
    merged: dict[str, int] = defaultdict(int)
    wrong = []
    for row in trajectories.to_pylist():
        rollout = row["rollout_id"]
        merged[rollout] += row["calls"]
        own = [one for call, one in sorted(calls[rollout].items()) if call >= row["first_call"]]
        if not _is_what_was_sampled(row, own):
            wrong.append(f"{rollout}, from call {row['first_call']}")
    lost = [rollout for rollout, sampled in calls.items() if merged[rollout] != len(sampled)]
    return wrong + [f"{rollout} has calls that are in no trajectory" for rollout in lost]


def _is_what_was_sampled(row: Mapping[str, Any], sampled: Sequence[Sampled]) -> bool:
    tokens, size = row["tokens"], len(row["tokens"])
    mask, logprobs = np.zeros(size, np.int8), np.zeros(size, np.float32)
    places: set[tuple[int, int]] = set()
    for call in sampled:
        begins, ends = len(call.prompt), len(call.prompt) + len(call.tokens)
        lies_in_it = tokens[:begins] == call.prompt and tokens[begins:ends] == call.tokens
        if lies_in_it and (begins, ends) not in places:  # otherwise an equal answer of another call
            mask[begins:ends] = 1
            logprobs[begins:ends] = call.logprobs
            places.add((begins, ends))
    return (
        len(places) == row["calls"]
        and max(ends for _, ends in places) == size
        and np.array_equal(mask, row["mask"])
        and np.array_equal(logprobs, np.array(row["logprobs"], np.float32))
    )


@dataclass(frozen=True, slots=True)
class Reuse:
    """Count of turns that extend an answer, and of those whose prompt keeps its sampled tokens."""

    kept: int
    extending: int

    @property
    def share(self) -> float:
        return self.kept / self.extending if self.extending else 1.0


def reuse(spans: pa.Table) -> Reuse:
    """Count the turns in a table of spans that extend an answer and keep its tokens.

    A turn extends the latest call whose messages it repeats, followed by an answer. A turn whose
    client wrote on into an answer that the model had ended is not counted: no prompt can have both.
    """
    by_rollout: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for span in spans.to_pylist():
        if span["kind"] == "llm":
            by_rollout[span["rollout_id"]].append(span)
    turns = [turn for calls in by_rollout.values() for turn in _extending(calls)]
    return Reuse(sum(_kept(earlier, later) for earlier, later in turns), len(turns))


def _extending(calls: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    histories = [json.loads(call["messages"]) for call in calls]
    for later, messages in enumerate(histories):
        for earlier in reversed(range(later)):
            before = len(histories[earlier])
            rest = messages[before:]
            goes_on = messages[:before] == histories[earlier] and rest
            if goes_on and rest[0]["role"] == "assistant" and calls[later]["kept_how"] != "ended":
                yield calls[earlier], calls[later]
                break


def _kept(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> bool:
    said = earlier["prompt_token_ids"] + earlier["response_token_ids"]
    return later["prompt_token_ids"][: len(said)] == said
