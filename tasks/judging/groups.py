"""spans → the shard of a judge: the rollouts of each group, as the judge is shown them."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import combinations
from math import ceil
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
    """Settings of a judge: what it is shown, its question, and its criteria with their weights.

    `opponents` is to how many others of its group each rollout is shown in a pair; None is all.
    """

    sees: Sees
    question: str
    criteria: Mapping[str, float] = field(default_factory=dict[str, float])
    opponents: int | None = None

    def sets(self, rollouts: Sequence[Transcript]) -> Iterator[Sequence[Transcript]]:
        """Split the rollouts of a group into what the judge is shown at once."""
        if self.sees == "group":
            yield rollouts
        elif self.sees == "rollout":
            yield from ([one] for one in rollouts)
        else:
            count = len(rollouts)
            reach = count - 1 if self.opponents is None else ceil(self.opponents / 2)
            for first, second in combinations(range(count), 2):
                if min(second - first, count - second + first) <= reach:
                    yield rollouts[first], rollouts[second]


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
        for rollout in read_transcripts([batch]):
            named = parse_rollout(rollout["rollout_id"])
            if rollout["error"] is None and named.split != BASELINE:
                groups[named.group].append(rollout)
        asked = {"question": judging.question, "criteria": dict(judging.criteria)}
        for rollouts in groups.values():
            drawn = sorted(rollouts, key=lambda one: _place(seed, one["rollout_id"]))
            example = {"example": json.loads(rollouts[0]["example"]), **asked}
            for shown in judging.sets(drawn):
                row: ShardRow = {
                    "example_id": rollouts[0]["example_id"],
                    "example": {"rollouts": [*map(_shown, shown)], **example},
                    "batch": number,
                    "round": 0,
                }
                rows.append(row)
    write_rows(path, rows)


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
