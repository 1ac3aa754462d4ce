"""spans → the shard of a judge: the rollouts of each group, as the judge is shown them."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

from adapters.calls import JsonObject
from tasks.recording.transcripts import Transcript, read_transcripts
from tasks.shards import ShardRow
from tasks.storage.durability import durable
from tasks.storage.json_files import write_rows
from tasks.storage.names import BASELINE, parse_rollout

Sees = Literal["group", "pair", "rollout"]
"""What a judge is shown at once: a group, two rollouts of it, or each rollout alone."""


@dataclass(frozen=True)
class Judging:
    """Settings of a judge: what it is shown, and what it is asked, by names of its example."""

    sees: Sees
    asked: Mapping[str, Any]

    def sets(self, rollouts: Sequence[Transcript]) -> Iterator[Sequence[Transcript]]:
        """Split the rollouts of a group into what the judge is shown at once."""
        if self.sees == "group":
            yield rollouts
        elif self.sees == "rollout":
            yield from ([one] for one in rollouts)
        else:
            yield from combinations(rollouts, 2)


@durable
def draw_groups(path: Path, spans: Sequence[Path], judging: Judging, seed: int) -> None:
    """Write the groups of sealed batches as the judge is shown them, an example a line.

    An example has the `rollouts` that have ended, without their rewards, the columns of the agent's
    example as `example`, and what the judge is asked. A rollout has its `id`, the `messages` of the
    last conversation, and those of all `conversations` by `role`. The order of the rollouts is
    drawn by the seed and their ids, so that no place says which is which.
    """
    rows: list[ShardRow] = []
    for number, batch in enumerate(spans):
        groups: dict[str, list[Transcript]] = defaultdict(list)
        for rollout in _ended(read_transcripts([batch])):
            named = parse_rollout(rollout["rollout_id"])
            if named.split != BASELINE:
                groups[named.group].append(rollout)
        for rollouts in groups.values():
            drawn = _drawn(rollouts, seed)
            rows += (_row(shown, judging, number) for shown in judging.sets(drawn))
    write_rows(path, rows)


@durable
def draw_held_out(
    path: Path, spans: Sequence[Path], others: Sequence[Path], judging: Judging, seed: int
) -> None:
    """Write held-out rollouts as a judge is shown them, an example a line, as `draw_groups` does.

    Each is alone or, for a judge of pairs, beside the one of `others` that has its example and its
    number; `others` are sealed batches of the same examples, played by another checkpoint.
    """
    rows: list[ShardRow] = []
    beside = {_held_out_place(one): one for one in _ended(read_transcripts(others))}
    for number, batch in enumerate(spans):
        for rollout in _ended(read_transcripts([batch])):
            shown = [rollout]
            if judging.sees == "pair" and (other := beside.get(_held_out_place(rollout))):
                shown.append(other)
            if judging.sees != "pair" or len(shown) == 2:
                rows.append(_row(_drawn(shown, seed), judging, number))
    write_rows(path, rows)


def _held_out_place(rollout: Transcript) -> str:
    """Return what is the same in the names of rollouts that two checkpoints play of an example."""
    name = rollout["rollout_id"]
    return name.removeprefix(parse_rollout(name).shard)


def _ended(rollouts: Sequence[Transcript]) -> list[Transcript]:
    return [one for one in rollouts if one["error"] is None]


def _drawn(rollouts: Sequence[Transcript], seed: int) -> list[Transcript]:
    return sorted(rollouts, key=lambda one: _place(seed, one["rollout_id"]))


def _row(shown: Sequence[Transcript], judging: Judging, batch: int) -> ShardRow:
    """Return the example of a judge that is shown these rollouts."""
    return {
        "example_id": shown[0]["example_id"],
        "example": {
            "rollouts": [*map(_shown, shown)],
            "example": json.loads(shown[0]["example"]),
            **judging.asked,
        },
        "batch": batch,
        "round": 0,
    }


def _place(seed: int, rollout_id: str) -> str:
    return sha256(f"{seed}/{rollout_id}".encode()).hexdigest()


def _shown(rollout: Transcript) -> JsonObject:
    said = [
        {
            "role": conversation["role"],
            "messages": [*_read(conversation["messages"]), _read(conversation["reply"])],
        }
        for conversation in rollout["conversations"]
    ]
    messages = said[-1]["messages"] if said else []
    return {"id": rollout["rollout_id"], "messages": messages, "conversations": said}


def _read(text: str) -> Any:
    return json.loads(text)
