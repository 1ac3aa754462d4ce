"""rollouts of a shard → games: one line of JSON for each rollout."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adapters.calls import POLICY
from tasks.recording.views import SPOKEN
from tasks.storage.checksums import verified
from tasks.storage.durability import durable
from tasks.storage.files import write_text
from tasks.storage.tables import query_beside, select

QUERY = SPOKEN + query_beside(__file__)

Game = dict[str, Any]


def read_games(
    spans: Sequence[Path], columns: Sequence[str] = (), threshold: float = 1.0
) -> list[Game]:
    """Read the rollouts of sealed batches, in order.

    A game has those `columns` of its example (all if none is named) and, besides: `index`, the
    example's row in the dataset; `reward`, and `correct`, whether the reward is at least
    `threshold`, both None if the rollout failed (`error` says why); `turn_index`, the number of
    the policy's answers that called no tool, and `num_tool_calls`; `interactions`, each with the
    role, the last question and the answer, whose tool calls are written `name(arguments)`; and
    `refused`, the calls that the door refused, each with the role and why.
    """
    files = [verified(path) for path in spans]
    rows = select(QUERY, spans=files, policy=POLICY).to_pylist()
    return [_game(row, columns, threshold) for row in rows]


def write_games(
    path: Path, spans: Sequence[Path], columns: Sequence[str] = (), threshold: float = 1.0
) -> None:
    """Write the games of sealed batches, one a line."""
    games = read_games(spans, columns, threshold)
    write_text(path, "".join(f"{json.dumps(game, ensure_ascii=False)}\n" for game in games))


list_games = durable("list_games", write_games)
"""rollouts of held-out examples → games."""


def _game(row: dict[str, Any], columns: Sequence[str], threshold: float) -> Game:
    reward, example = row["reward"], json.loads(row["example"])
    ours = {
        "index": row["example_id"],
        "rollout": row["rollout_id"],
        "reward": reward,
        "correct": None if reward is None else reward >= threshold,
        "num_tool_calls": row["num_tool_calls"],
        "turn_index": row["turn_index"],
        "interactions": row["interactions"],
        "error": row["error"],
        "refused": row["refused"],
    }
    return {name: example[name] for name in columns or example} | ours
