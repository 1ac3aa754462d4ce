"""Rollouts of a step, token by token, with the advantages by which they were trained."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from adapters.tinker.token_texts import TokenText
from tasks.recording.views import Views
from tasks.reports.transcripts import best_middle_worst
from tasks.storage.arrivals import batches_of
from tasks.storage.checksums import verified
from tasks.storage.files import is_written
from tasks.storage.run_folder import RunFolder
from tasks.storage.tables import arrays, query_beside, select

QUERY = query_beside(__file__)
TOKENS = query_beside(str(Path(__file__).with_name("marked_tokens")))

MOST_TOKENS = 3000
"""Tokens of a trajectory that are shown; of a longer one its begin and its end."""
LEVELS = 4
"""Strengths of the colour of a trained token."""


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
    """Rollout of a step: its rank in words, its tokens, and the calls of other roles."""

    title: str
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
    by_rollout: dict[str, list[MarkedTrajectory]] = {}
    for policy in run.policies():
        for rollout_id, marked in _trajectories(run, policy, step, text_of or _number):
            by_rollout.setdefault(rollout_id, []).append(marked)
    shown = sorted({one.role for many in by_rollout.values() for one in many})
    parameters = {"batches": batches_of(run, step), "shown": shown}
    found = views.execute(QUERY, parameters).fetchall()
    trained = [
        row for row in found if any(one.advantage is not None for one in by_rollout.get(row[0], []))
    ]
    return [
        MarkedRollout(title, step, rollout, reward, example, by_rollout.get(rollout, []), others)
        for title, (rollout, reward, example, others) in best_middle_worst(trained or found)
    ]


def _trajectories(
    run: RunFolder, policy: str, step: int, text_of: TokenText
) -> Iterator[tuple[str, MarkedTrajectory]]:
    """Yield the trajectories in which a policy sampled something, with their rollouts."""
    trajectories = run.trajectories(policy, step)
    if not is_written(trajectories):
        return
    datums = verified(run.datums(policy, step))
    table = select(TOKENS, trajectories=verified(trajectories), datums=datums)
    lists = [arrays(table[name]) for name in ("tokens", "logprobs", "mask", "advantages")]
    strongest = max((float(np.abs(one).max()) for one in lists[-1] if len(one)), default=0.0)
    rows = table.select(["rollout_id", "role", "advantage"]).to_pylist()
    for row, tokens, logprobs, mask, weights in zip(rows, *lists, strict=True):
        marks = _marks(mask, logprobs, weights, strongest)
        pieces = [*_pieces(tokens, marks, text_of)]
        yield row["rollout_id"], MarkedTrajectory(policy, row["role"], row["advantage"], pieces)


def _marks(
    mask: np.ndarray, logprobs: np.ndarray, weights: np.ndarray, strongest: float
) -> Iterator[tuple[str, str]]:
    """Yield the class and the title of each token; without `weights`, none was trained."""
    for place, sampled in enumerate(mask):
        likely = f"probability {np.exp(logprobs[place]):.3g}"
        if not sampled:
            yield "given", ""
        elif not len(weights):
            yield "sampled", f"not trained, {likely}"
        else:
            weight = float(weights[place - 1])  # a datum's targets leave the first token out
            level = int(np.ceil(LEVELS * abs(weight) / strongest)) if strongest else 0
            mark = f"{'up' if weight > 0 else 'down'}-{level}" if level else "sampled"
            yield mark, f"advantage {weight:+.4g}, {likely}"


def _pieces(
    tokens: np.ndarray, marks: Iterable[tuple[str, str]], text_of: TokenText
) -> Iterator[Piece]:
    """Yield the texts of tokens; those that nobody sampled are one piece, up to the next token."""
    half, left_out = MOST_TOKENS // 2, len(tokens) - MOST_TOKENS
    shown: list[tuple[int | str, tuple[str, str]]] = [*zip(tokens.tolist(), marks, strict=True)]
    if left_out > 0:
        shown[half:-half] = [(f"\n[… {left_out} tokens are left out …]\n", ("given", ""))]
    texts = (one if isinstance(one, str) else text_of(one) for one, _ in shown)
    pieces = (Piece(text, *mark) for text, (_, mark) in zip(texts, shown, strict=True))
    for mark, alike in groupby(pieces, key=lambda piece: piece.mark):
        if mark == "given":
            yield Piece("".join(piece.text for piece in alike), mark)
        else:
            yield from alike


def _number(token: int) -> str:
    return f" {token} "
