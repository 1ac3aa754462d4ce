"""sealed batches → what was said in each rollout: as Markdown, or as games, a line of JSON each."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from adapters.calls import POLICY, JsonObject, Message
from tasks.recording.spans import cause_of
from tasks.recording.transcripts import Transcript, describe_end, read_transcripts
from tasks.storage.durability import durable
from tasks.storage.files import write_text

MOST_FAILED = 3
"""Failed rollouts that are shown beside the best, the middle and the worst."""

T = TypeVar("T")


def best_middle_worst(ranked: Sequence[T]) -> list[tuple[str, T]]:
    """Return the first, the middle and the last of what is ranked, each once, with its title."""
    titles = {len(ranked) // 2: "middle", len(ranked) - 1: "worst", 0: "best"}
    return [(titles[rank], ranked[rank]) for rank in sorted(titles)] if ranked else []


def transcripts(spans: Sequence[Path]) -> str:
    """Return the best, the middle and the worst rollout of sealed batches as Markdown.

    The first failed rollouts, of up to MOST_FAILED different errors, follow with those errors.
    """
    rollouts = read_transcripts(spans)
    ended = [row for row in rollouts if row["error"] is None]
    ranked = sorted(ended, key=lambda row: -(row["reward"] or 0.0))
    failed: dict[str, Transcript] = {}
    for row in rollouts:
        if row["error"] is not None:
            failed.setdefault(cause_of(row["error"]), row)
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
    parts = [f"## {title}: {row['rollout_id']}\n\n{describe_end(row)}\n"]
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
