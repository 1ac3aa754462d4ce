"""Rollouts of a step, token by token, with the advantages by which they were trained."""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from adapters.tinker.token_texts import TokenText
from tasks.recording.views import Views
from tasks.storage.arrivals import batches_of
from tasks.storage.files import is_written
from tasks.storage.run_folder import RunFolder
from tasks.storage.tables import arrays, query_beside, read

QUERY = query_beside(__file__)

MOST_TOKENS = 3000
"""Tokens of a trajectory that are shown; of a longer one its begin and its end."""
LEVELS = 4
"""Strengths of the colour of a trained token."""

Key = tuple[str, str, int]
"""Rollout, role and first call of a trajectory."""


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
    """Rollout of a step: its place among those shown, its tokens, and the calls of other roles."""

    place: str
    step: int
    rollout_id: str
    reward: float
    example: str | None
    trajectories: Sequence[MarkedTrajectory]
    others: Sequence[Mapping[str, Any]]


def read_marked_rollouts(
    run: RunFolder, step: int, views: Views, text_of: TokenText | None
) -> list[MarkedRollout]:
    """Return the best, the middle and the worst rollout of a step that is done.

    They are chosen among the rollouts that were trained on, if there are any. Without `text_of`,
    the tokens are shown by their numbers.
    """
    by_rollout = mark_trajectories(run, step, text_of)
    shown = sorted({one.role for many in by_rollout.values() for one in many})
    parameters = {"batches": batches_of(run, step), "shown": shown}
    found = views.execute(QUERY, parameters).fetchall()
    trained = [
        row for row in found if any(one.advantage is not None for one in by_rollout.get(row[0], []))
    ]
    ranked = trained or found
    places = {len(ranked) // 2: "middle"} | {len(ranked) - 1: "worst"} | {0: "best"}
    return [
        MarkedRollout(
            places[place], step, rollout, reward, example, by_rollout.get(rollout, []), others
        )
        for place, (rollout, reward, example, others) in enumerate(ranked)
        if place in places
    ]


def mark_trajectories(
    run: RunFolder, step: int, text_of: TokenText | None, only: Container[str] | None = None
) -> dict[str, list[MarkedTrajectory]]:
    """Map the rollouts of a step, or `only` those, to what each policy sampled in them."""
    by_rollout: dict[str, list[MarkedTrajectory]] = {}
    for policy in run.policies():
        for rollout_id, marked in _trajectories(run, policy, step, text_of or _number, only):
            by_rollout.setdefault(rollout_id, []).append(marked)
    return by_rollout


def _trajectories(
    run: RunFolder, policy: str, step: int, text_of: TokenText, only: Container[str] | None
) -> Iterator[tuple[str, MarkedTrajectory]]:
    """Yield the trajectories in which a policy sampled something, with their rollouts."""
    if not is_written(run.trajectories(policy, step)):
        return
    datums = _datums(run, policy, step)
    strongest = max((float(np.abs(weights).max()) for _, weights in datums.values()), default=0.0)
    table = read(run.trajectories(policy, step))
    keys = table.select(["rollout_id", "role", "first_call"]).to_pylist()
    columns = zip(*(arrays(table[name]) for name in ("tokens", "logprobs", "mask")), strict=True)
    for row, (tokens, logprobs, mask) in zip(keys, columns, strict=True):
        if not mask.any() or (only is not None and row["rollout_id"] not in only):
            continue
        key: Key = row["rollout_id"], row["role"], row["first_call"]
        advantage, weights = datums.get(key, (None, None))
        pieces = [*_pieces(tokens, _marks(mask, logprobs, weights, strongest), text_of)]
        yield row["rollout_id"], MarkedTrajectory(policy, row["role"], advantage, pieces)


def _datums(run: RunFolder, policy: str, step: int) -> dict[Key, tuple[float, np.ndarray]]:
    """Map each datum to its mean advantage and those of its trajectory's tokens."""
    if not is_written(run.datums(policy, step)):
        return {}
    columns = ["rollout_id", "role", "first_call", "advantage", "advantages"]
    table = read(run.datums(policy, step), columns)
    rows = table.drop_columns(["advantages"]).to_pylist()
    return {
        (row["rollout_id"], row["role"], row["first_call"]): (
            row["advantage"],
            np.concatenate([[0.0], weights]),  # a datum's targets leave the first token out
        )
        for row, weights in zip(rows, arrays(table["advantages"]), strict=True)
    }


def _marks(
    mask: np.ndarray, logprobs: np.ndarray, weights: np.ndarray | None, strongest: float
) -> list[tuple[str, str]]:
    """Return the class and the title of each token."""
    marks = []
    for place, sampled in enumerate(mask):
        if not sampled:
            marks.append(("given", ""))
            continue
        likely = f"probability {np.exp(logprobs[place]):.3g}"
        if weights is None:
            marks.append(("sampled", f"not trained, {likely}"))
            continue
        weight = float(weights[place])
        level = int(np.ceil(LEVELS * abs(weight) / strongest)) if strongest else 0
        sign = "up" if weight > 0 else "down"
        mark = f"{sign}-{level}" if level else "sampled"
        marks.append((mark, f"advantage {weight:+.4g}, {likely}"))
    return marks


def _pieces(
    tokens: np.ndarray, marks: Sequence[tuple[str, str]], text_of: TokenText
) -> Iterator[Piece]:
    """Yield the texts of tokens; those that nobody sampled are one piece, up to the next token."""
    half, given = MOST_TOKENS // 2, ""
    left_out = range(half, len(tokens) - half)
    for place, (token, (mark, title)) in enumerate(zip(tokens.tolist(), marks, strict=True)):
        if place in left_out:
            if place == half:
                given += f"\n[… {len(left_out)} tokens are left out …]\n"
            continue
        if mark == "given":
            given += text_of(token)
            continue
        if given:
            yield Piece(given, "given")
            given = ""
        yield Piece(text_of(token), mark, title)
    if given:
        yield Piece(given, "given")


def _number(token: int) -> str:
    return f" {token} "
