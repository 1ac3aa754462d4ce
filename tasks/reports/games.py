"""rollouts of a batch → games: a line of JSON each, for whoever reads them one by one."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adapters.calls import POLICY
from tasks.storage.checksums import verified
from tasks.storage.files import write_text
from tasks.storage.tables import select

QUERY = Path(__file__).with_suffix(".sql").read_text(encoding="utf-8")

Game = dict[str, Any]


def read_games(spans: Path, columns: Sequence[str] = (), threshold: float = 1.0) -> list[Game]:
    """The rollouts of a sealed batch, in its order.

    A game has those `columns` of its example (all, if none is named) and, over them: `index`, the
    example's row in the dataset; `reward`, and whether it is at least `threshold` (`correct`), both
    None where the rollout failed (`error` says why); `turn_index`, the answers of the policy that
    called no tool, and `num_tool_calls`; and `interactions`: whom what was asked last, and what was
    answered.
    """
    rows = select(QUERY, spans=verified(spans), policy=POLICY).to_pylist()
    return [_game(row, columns, threshold) for row in rows]


def write_games(
    spans: Path, path: Path, columns: Sequence[str] = (), threshold: float = 1.0
) -> Path:
    """`path`, a game a line."""
    games = read_games(spans, columns, threshold)
    return write_text(path, "".join(f"{json.dumps(game, ensure_ascii=False)}\n" for game in games))


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
    }
    return {name: example[name] for name in columns or example} | ours
