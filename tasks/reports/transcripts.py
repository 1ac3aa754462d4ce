"""sealed batches → what was said in each rollout: as Markdown, or as games, a line of JSON each."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict, TypeVar

from adapters.calls import POLICY, JsonObject, Message
from tasks.recording.views import SPOKEN
from tasks.storage.checksums import verified
from tasks.storage.durability import durable
from tasks.storage.files import write_text
from tasks.storage.tables import query_beside, select

QUERY = SPOKEN + query_beside(__file__)

MOST_FAILED = 3
"""Failed rollouts that are shown beside the best, the middle and the worst."""

T = TypeVar("T")


class Transcript(TypedDict):
    """Rollout by the attempt that counts: its example, its end, and what was said in it.

    `error` is None unless the rollout failed. `turn_index` counts the policy's answers that called
    no tool, and `num_tool_calls` its tool calls. An interaction has the `role`, the last `question`
    and the `response`, with its tool calls as `name(arguments)`; a conversation has the `role`, the
    `messages` and the last `reply` as JSON; a refused call has the `role`, and `why`.
    """

    rollout_id: str
    example_id: int
    example: str
    reward: float | None
    error: str | None
    turn_index: int
    num_tool_calls: int
    interactions: Sequence[Mapping[str, str | None]]
    refused: Sequence[Mapping[str, str]]
    conversations: Sequence[Mapping[str, str]]


def read_transcripts(spans: Sequence[Path]) -> list[Transcript]:
    """Read the rollouts of sealed batches, in order."""
    files = [verified(path) for path in spans]
    return select(QUERY, spans=files, policy=POLICY).to_pylist()


def best_middle_worst(ranked: Sequence[T]) -> list[tuple[str, T]]:
    """Return the first, the middle and the last of what is ranked, each once, with its title."""
    titles = {len(ranked) // 2: "middle", len(ranked) - 1: "worst", 0: "best"}
    return [(titles[rank], ranked[rank]) for rank in sorted(titles)] if ranked else []


def transcripts(spans: Sequence[Path]) -> str:
    """Return the best, the middle and the worst rollout of sealed batches as Markdown.

    The first failed rollouts, of up to MOST_FAILED different errors, follow with those errors.
    """
    rollouts = read_transcripts(spans)
    ended = [row for row in rollouts if row["reward"] is not None]
    ranked = sorted(ended, key=lambda row: -(row["reward"] or 0.0))
    failed: dict[str, Transcript] = {}
    for row in rollouts:
        if row["reward"] is None and row["error"] is not None:
            failed.setdefault(row["error"], row)
    shown = [("failed", row) for row in [*failed.values()][:MOST_FAILED]]
    return "\n".join(_markdown(*one) for one in (*best_middle_worst(ranked), *shown))


def read_games(
    spans: Sequence[Path], columns: Sequence[str] = (), threshold: float = 1.0
) -> list[JsonObject]:
    """Read the rollouts of sealed batches as games, in order.

    A game has those `columns` of its example (all if none is named), the example's row in the
    dataset as `index`, and `correct`, whether the reward is at least `threshold`, which is None if
    the rollout failed. The rest is of its Transcript, without the conversations.
    """
    return [_game(row, columns, threshold) for row in read_transcripts(spans)]


@durable
def list_games(
    path: Path, spans: Sequence[Path], columns: Sequence[str] = (), threshold: float = 1.0
) -> None:
    """Write the games of sealed batches, one a line."""
    games = read_games(spans, columns, threshold)
    write_text(path, "".join(f"{json.dumps(game, ensure_ascii=False)}\n" for game in games))


def _game(row: Transcript, columns: Sequence[str], threshold: float) -> JsonObject:
    example, reward = json.loads(row["example"]), row["reward"]
    return {name: example[name] for name in columns or example} | {
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


def _markdown(title: str, row: Transcript) -> str:
    ended = f"reward {row['reward']:.4g}" if row["reward"] is not None else row["error"]
    parts = [f"## {title}: {row['rollout_id']}\n\n{ended}\n"]
    for conversation in row["conversations"]:
        messages: list[Message] = json.loads(conversation["messages"])
        messages.append(json.loads(conversation["reply"]))
        if conversation["role"] != POLICY:
            parts.append(f"*asked of the {conversation['role']}*\n")
        parts += [f"**{message['role']}**\n\n{_fenced(_text(message))}\n" for message in messages]
    parts += [
        f"*a call of the {call['role']} was refused*\n\n{_fenced(call['why'])}\n"
        for call in row["refused"]
    ]
    return "\n".join(parts)


def _text(message: Message) -> str:
    """Return the words of a message, and the tools it calls."""
    words = [message.get("reasoning_content"), message.get("content")]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    lines = [word for word in words if word]
    return "\n".join([*lines, *(f"{call['name']}({call['arguments']})" for call in calls)])


def _fenced(text: str) -> str:
    """Fence a text as a code block that nothing in the text can end."""
    longest = max((len(ticks) for ticks in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"
