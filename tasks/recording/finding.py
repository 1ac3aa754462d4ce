"""Rollouts of runs, found by what was said in them, by reward, by error and by tool."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ratchet.adapters.errors import UserError, counted
from ratchet.adapters.process.terminal import hanging
from ratchet.tasks.recording.views import SPAN_VIEWS, open_views
from ratchet.tasks.storage.run_folder import RunFolder
from ratchet.tasks.storage.tables import query_beside

QUERY = query_beside(__file__)

LONGEST_SHOWN = 400
"""Letters of a question or an answer that are shown, around what is sought if it is there."""


@dataclass(frozen=True)
class Sought:
    """Rollouts that are sought: each mark that is given must fit, in capitals or not.

    The `text` stands in a question, an answer or the example, the `error` in its name or message;
    `tool` is the whole name of one that was called; `least` and `most` bound the reward.
    """

    text: str = ""
    error: str = ""
    tool: str = ""
    least: float | None = None
    most: float | None = None


def read_range(text: str) -> tuple[float | None, float | None]:
    """Read the least and the greatest reward of `0.2..0.8`, `..0`, `1..`, a number, or nothing."""
    least, dots, most = text.partition("..")
    try:
        bounds = [float(bound) if bound else None for bound in (least, most if dots else least)]
    except ValueError as error:
        raise UserError(
            f"{text!r} is no reward and no range of rewards; give one such as 0.2..0.8, ..0 or 1"
        ) from error
    return bounds[0], bounds[1]


def describe_found(runs: Sequence[RunFolder], sought: Sought, first: int) -> str:
    """Show what was said in the `first` rollouts that fit, and count the others."""
    with open_views(runs, SPAN_VIEWS) as views:
        found = views.sql(QUERY, params=asdict(sought)).to_arrow_table().to_pylist()
    shown = ["\n".join(_lines(row, sought.text)) for row in found[:first]]
    left = len(found) - len(shown)
    end = f"{counted(left, 'more rollout')}; --first {len(found)} shows all" if left > 0 else ""
    return "\n\n".join([*shown, *filter(None, [end])])


def _lines(row: Mapping[str, Any], text: str) -> Iterator[str]:
    """Yield the lines of a rollout: its name and its end, and each question with its answer."""
    reward = "no reward" if row["reward"] is None else f"reward {row['reward']:.4g}"
    yield hanging(f"{row['run']} {row['rollout_id']}, {row['error'] or reward}")
    for turn in row["turns"] or ():
        yield hanging(f"{turn['role']} was asked: {_around(turn['asked'] or '', text)}")
        yield hanging(f"{turn['role']} answered: {_around(turn['said'], text)}")


def _around(words: str, text: str) -> str:
    """Return the words around a text, or if they lack it their beginning."""
    if len(words) <= LONGEST_SHOWN:
        return words
    at = max(words.lower().find(text.lower()), 0)
    start = max(0, min(at - LONGEST_SHOWN // 2, len(words) - LONGEST_SHOWN))
    cut = words[start : start + LONGEST_SHOWN]
    return f"{'… ' if start else ''}{cut}{' …' if start + LONGEST_SHOWN < len(words) else ''}"
