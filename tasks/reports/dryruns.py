"""Report of a dry run: its spans, drift, rewards, datums and one transcript."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adapters.calls import POLICY
from tasks.recording.views import SPOKEN
from tasks.reports.drift import read_drift
from tasks.reports.failures import read_failures
from tasks.reports.games import Game, read_games
from tasks.reports.reports import aligned
from tasks.storage.checksums import verified
from tasks.storage.tables import arrays, query_beside, read, select

QUERY = SPOKEN + query_beside(__file__)
MOST_SPANS = 40
WIDEST = 48
LONGEST_QUESTION = 240


def describe(
    spans: Sequence[Path],
    trajectories: Mapping[str, Path],
    datums: Mapping[str, Path],
    read_context: int | None = None,
) -> str:
    """Describe the sealed batches of a dry run, and what each policy made of them, by its name.

    `read_context` is the length of the longest text that the model has read.
    """
    games = read_games(spans)
    drifts = [drift for path in trajectories.values() for drift in read_drift(path)]
    parts = {
        "spans": _spans(spans, read_context),
        "drift": "\n".join(map(str, drifts)) or "no rollout has a reward",
        "rewards": _rewards(games),
        "datums": "\n".join(_datums(name, trajectories[name], datums[name]) for name in datums),
        "transcript": _transcript(games),
    }
    return "\n\n".join(f"# {title}\n\n{text}" for title, text in parts.items())


def _spans(spans: Sequence[Path], read_context: int | None) -> str:
    """List the spans, a line each, and below them the errors, whole."""
    rows = select(QUERY, spans=[verified(path) for path in spans]).to_pylist()
    shown = [[_brief(value) for value in row.values()] for row in rows[:MOST_SPANS]]
    left = len(rows) - len(shown)
    more = f"\n… and {left} more, in {spans[0].parent}" if left else ""
    below = [_noise(rows, read_context), *map(str, read_failures(spans))]
    return "\n\n".join([aligned(list(rows[0]), shown) + more, *filter(None, below)])


def _noise(rows: Sequence[Mapping[str, Any]], read_context: int | None) -> str:
    """Say that prompts are longer than what the model has read; empty if none is."""
    # A prompt of a role that no policy answers has no prefix, and was read by another model.
    longest = max((row["prompt"] or 0 for row in rows if row["prefix"]), default=0)
    if read_context is None or longest <= read_context:
        return ""
    return (
        f"prompts of up to {longest} tokens are beyond the {read_context} that the model has read; "
        "what it answers to them is noise"
    )


def _brief(value: object) -> object:
    """Shorten a text to one line of a table."""
    if not isinstance(value, str):
        return value
    line = " ".join(value.split())
    return line if len(line) <= WIDEST else f"{line[: WIDEST - 1]}…"


def _rewards(games: list[Game]) -> str:
    """List the rewards by group; a group with equal rewards trains nothing."""
    groups: dict[str, list[object]] = {}
    for game in games:
        group = game["rollout"].rpartition("-")[0]
        groups.setdefault(group, []).append("failed" if game["error"] else game["reward"])
    columns = max(map(len, groups.values()))
    return aligned(["group", *map(str, range(columns))], [[g, *r] for g, r in groups.items()])


def _datums(policy: str, trajectories: Path, datums: Path) -> str:
    trained = [mask.any() for mask in arrays(read(trajectories)["mask"])]
    masks = [mask.sum() for mask in arrays(read(datums)["mask"])]
    return (
        f"{sum(trained)} trajectories of the {_called(policy)} made {len(masks)} datums, "
        f"in which {sum(masks)} tokens would be trained"
    )


def _called(policy: str) -> str:
    return POLICY if policy == POLICY else f"{POLICY} {policy}"


def _transcript(games: list[Game]) -> str:
    """Show the best rollout, or a failed one: the end of each question, and each answer."""
    best = max(games, key=lambda game: float("-inf") if game["error"] else game["reward"])
    lines = [f"{best['rollout']}, {best['error'] or 'reward ' + format(best['reward'], 'g')}"]
    for turn in best["interactions"]:
        lines += [
            f"\n{turn['role']} was asked: {_end(turn['question'] or '')}",
            f"{turn['role']} answered: {turn['response']}",
        ]
    lines += [f"\n{call['role']} was refused: {call['why']}" for call in best["refused"]]
    return "\n".join(lines)


def _end(question: str) -> str:
    whole = len(question) <= LONGEST_QUESTION
    return question if whole else f"… {question[-LONGEST_QUESTION:]}"
