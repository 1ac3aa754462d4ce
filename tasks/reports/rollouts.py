"""Rollouts as people read them: word for word, token by token, and before and after training."""

import json
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from ratchet.adapters.calls import POLICY, JsonObject, Message
from ratchet.adapters.tinker.bases import Decode
from ratchet.tasks.recording.broken_prefixes import BrokenPrefix, find_broken_prefixes
from ratchet.tasks.recording.spans import cause_of
from ratchet.tasks.recording.transcripts import (
    Transcript,
    describe_end,
    read_transcripts,
    tell_left_out,
)
from ratchet.tasks.recording.views import Views
from ratchet.tasks.reports.tables import Call, calls_apart
from ratchet.tasks.storage.files import is_written, verified, write_text
from ratchet.tasks.storage.run_folder import RunFolder
from ratchet.tasks.storage.tables import arrays, query_beside, read_table, select

MARKED_ROLLOUTS_QUERY, MARKED_TOKENS_QUERY, BEFORE_AFTER_QUERY = (
    query_beside(__file__, name) for name in ("marked_rollouts", "marked_tokens", "before_after")
)

DATUM_COLUMNS = pa.schema(
    [
        ("rollout_id", pa.string()),
        ("role", pa.string()),
        ("first_call", pa.int32()),
        ("advantage", pa.float64()),
        ("advantages", pa.list_(pa.float32())),
    ]
)
"""Columns of datums that mark tokens."""

MOST_TOKENS = 3000
"""Tokens of a trajectory that are shown; a longer one shows its begin and its end."""
LEVELS = 4
"""Strengths of the colour of a trained token."""
GIVEN = ("given", "")
"""Class and title of a token that nobody sampled."""

MOST_FAILED = 3
"""Failed rollouts that are shown beside the best, the middle and the worst."""

LETTERS_APART = 600
"""Letters of what was asked, and of what was said, before and after."""

SHOWN_SPLITS = ("test", "train")
"""Splits with an example to show: the first example that was played at two checkpoints."""

STEPS = """
select min(step), max(step) from rollouts where split = $split and reward is not null
"""

T = TypeVar("T")


def best_middle_worst(ranked: Sequence[T]) -> list[tuple[str, T]]:
    """Return the first, the middle and the last of ranked values, each once, with its title."""
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

    A game has the `columns` of its example (all columns by default), the example's row in the
    dataset as `index`, and `correct`: whether the reward is at least `threshold`, or None if the
    rollout failed. The rest is of its Transcript, without the conversations.
    """
    return [_game(row, columns, threshold) for row in read_transcripts(spans)]


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
    parts += [f"*{told}*\n" for told in tell_left_out(row)]
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


@dataclass(frozen=True)
class Piece:
    """Text of one sampled token, or of several tokens that nobody sampled.

    `mark` is the page's class: `given`, `sampled` if it was not trained, or its advantage's sign
    and level. `title` says the numbers.
    """

    text: str
    mark: str
    title: str = ""


@dataclass(frozen=True)
class MarkedTrajectory:
    """Trajectory with a policy's tokens. The advantage is the mean over its tokens, if trained."""

    policy: str
    role: str
    advantage: float | None
    pieces: Sequence[Piece]


@dataclass(frozen=True)
class MarkedRollout:
    """Rollout of a step: its rank in words, its tokens, the calls of other roles, and its place."""

    title: str
    step: int
    rollout_id: str
    reward: float
    example: str | None
    trajectories: Sequence[MarkedTrajectory]
    others: Sequence[Mapping[str, Any]]
    place: Path | None
    """Its place, if that is kept."""
    broken: Sequence[BrokenPrefix]
    """Its calls that begin a trajectory anew."""


def read_marked_rollouts(
    run: RunFolder, step: int, views: Views, decode: Decode | None
) -> list[MarkedRollout]:
    """Return the best, the middle and the worst rollout of a step that is done.

    They are chosen among the rollouts that were trained on, if there are any. Without `decode`,
    the tokens are shown by their numbers.
    """
    by_rollout = mark_trajectories(run, step, decode)
    shown = sorted({one.role for many in by_rollout.values() for one in many})
    batches = run.batches_of(step)
    parameters = {"batches": batches, "shown": shown}
    found = views.execute(MARKED_ROLLOUTS_QUERY, parameters).fetchall()
    trained = [
        row for row in found if any(one.advantage is not None for one in by_rollout.get(row[0], []))
    ]
    spans = [run.spans(batch) for batch in batches]
    broken = [one for one in find_broken_prefixes(spans) if one.role in shown]
    return [
        MarkedRollout(
            title,
            step,
            rollout,
            reward,
            example,
            by_rollout.get(rollout, []),
            others,
            run.kept_place(rollout),
            [one for one in broken if one.rollout == rollout],
        )
        for title, (rollout, reward, example, others) in best_middle_worst(trained or found)
    ]


def mark_trajectories(
    run: RunFolder, step: int, decode: Decode | None, only: Container[str] | None = None
) -> dict[str, list[MarkedTrajectory]]:
    """Map the rollouts of a step, or `only` those, to what each policy sampled in them."""
    by_rollout: dict[str, list[MarkedTrajectory]] = {}
    for policy in run.policies():
        for rollout_id, marked in _trajectories(run, policy, step, decode or _numbers, only):
            by_rollout.setdefault(rollout_id, []).append(marked)
    return by_rollout


def _trajectories(
    run: RunFolder, policy: str, step: int, decode: Decode, only: Container[str] | None
) -> Iterator[tuple[str, MarkedTrajectory]]:
    """Yield the trajectories that have sampled tokens of a policy, with their rollouts."""
    trajectories = run.trajectories(policy, step)
    if not is_written(trajectories):
        return
    path = run.datums(policy, step)
    datums = (
        read_table(path, DATUM_COLUMNS.names) if is_written(path) else DATUM_COLUMNS.empty_table()
    )
    table = select(MARKED_TOKENS_QUERY, {"datums": datums}, trajectories=verified(trajectories))
    lists = [arrays(table[name]) for name in ("tokens", "logprobs", "mask", "advantages")]
    strongest = max((float(np.abs(one).max()) for one in lists[-1] if len(one)), default=0.0)
    rows = table.select(["rollout_id", "role", "advantage"]).to_pylist()
    for row, tokens, logprobs, mask, weights in zip(rows, *lists, strict=True):
        if only is not None and row["rollout_id"] not in only:
            continue
        marks = _marks(mask, logprobs, weights, strongest)
        pieces = [*_pieces(tokens, marks, decode)]
        yield row["rollout_id"], MarkedTrajectory(policy, row["role"], row["advantage"], pieces)


def _marks(
    mask: np.ndarray, logprobs: np.ndarray, weights: np.ndarray, strongest: float
) -> Iterator[tuple[str, str]]:
    """Yield the class and the title of each token; without `weights`, no token was trained."""
    for place, sampled in enumerate(mask):
        likely = f"probability {np.exp(logprobs[place]):.3g}"
        if not sampled:
            yield GIVEN
        elif not len(weights):
            yield "sampled", f"not trained, {likely}"
        else:
            weight = float(weights[place - 1])  # a datum's targets leave the first token out
            level = int(np.ceil(LEVELS * abs(weight) / strongest)) if strongest else 0
            mark = f"{'up' if weight > 0 else 'down'}-{level}" if level else "sampled"
            yield mark, f"advantage {weight:+.4g}, {likely}"


def _pieces(
    tokens: np.ndarray, marks: Iterable[tuple[str, str]], decode: Decode
) -> Iterator[Piece]:
    """Yield the texts of tokens; unsampled tokens are one piece, up to the next sampled token."""
    shown = [*zip(tokens.tolist(), marks, strict=True)]
    half, left_out = MOST_TOKENS // 2, len(tokens) - MOST_TOKENS
    if left_out > 0:
        yield from _decoded(shown[:half], decode)
        yield Piece(f"\n[… {left_out} tokens are left out …]\n", *GIVEN)
        shown = shown[-half:]
    yield from _decoded(shown, decode)


def _decoded(shown: Iterable[tuple[int, tuple[str, str]]], decode: Decode) -> Iterator[Piece]:
    for mark, alike in groupby(shown, key=lambda token_and_mark: token_and_mark[1]):
        tokens = [token for token, _ in alike]
        for together in [tokens] if mark == GIVEN else [[token] for token in tokens]:
            yield Piece(decode(together), *mark)


def _numbers(tokens: Sequence[int]) -> str:
    return "".join(f" {token} " for token in tokens)


@dataclass(frozen=True)
class PlayedExample:
    """An example as a checkpoint played it, by the one of its `rollouts` that is shown.

    `step` is of its shard, `mean` is over its rollouts, and `calls` are what was asked and said.
    """

    step: int
    rollout_id: str
    reward: float
    rollouts: int
    mean: float
    calls: Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class BeforeAndAfter:
    """Examples that an early and a late checkpoint played; `same` if it is one example.

    `gain` is the change of its mean reward.
    """

    split: str
    same: bool
    gain: float
    before: PlayedExample
    after: PlayedExample

    @property
    def apart(self) -> tuple[int, Call, Call]:
        """Number of the first call that differs, and that call before and after."""
        return calls_apart(self.before.calls, self.after.calls, LETTERS_APART)

    @property
    def change(self) -> str:
        if not self.same:
            return "two examples of like rank, since the steps share none"
        if not self.gain:
            return "its reward is as it was"
        return f"its reward {'rose' if self.gain > 0 else 'fell'} by {abs(self.gain):.3g}"


def find_before_and_after(views: Views) -> list[BeforeAndAfter]:
    """Find the examples that a run changed most, for the better and the worse.

    They are held-out examples that two checkpoints played, or else those of two training steps.
    """
    for split in SHOWN_SPLITS:
        [(before, after)] = views.execute(STEPS, {"split": split}).fetchall()
        if before == after:
            continue
        values = {"split": split, "before": before, "after": after}
        rows = views.sql(BEFORE_AFTER_QUERY, params=values).to_arrow_table()
        if len(rows):
            return [
                BeforeAndAfter(
                    split,
                    row["same"],
                    row["gain"],
                    PlayedExample(before, **row["before"]),
                    PlayedExample(after, **row["after"]),
                )
                for row in rows.to_pylist()
            ]
    return []
