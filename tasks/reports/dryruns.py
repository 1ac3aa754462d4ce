"""Report of a dry run: its spans, drift, rewards, datums and one transcript."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from adapters.calls import POLICY
from tasks.reports.drift import read_drift
from tasks.reports.games import Game, read_games
from tasks.reports.reports import aligned
from tasks.storage.checksums import verified
from tasks.storage.tables import arrays, query_beside, read, select

QUERY = query_beside(__file__)
MOST_SPANS = 40
WIDEST = 48
LONGEST_QUESTION = 240


def describe(
    spans: Sequence[Path], trajectories: Mapping[str, Path], datums: Mapping[str, Path]
) -> str:
    """Describe the sealed batches of a dry run, and what each policy made of them, by its name."""
    games = read_games(spans)
    drifts = [drift for path in trajectories.values() for drift in read_drift(path)]
    parts = {
        "spans": _spans(spans),
        "drift": "\n".join(map(str, drifts)) or "no rollout has a reward",
        "rewards": _rewards(games),
        "datums": "\n".join(_datums(name, trajectories[name], datums[name]) for name in datums),
        "transcript": _transcript(games),
    }
    return "\n\n".join(f"# {title}\n\n{text}" for title, text in parts.items())


def _spans(spans: Sequence[Path]) -> str:
    rows = select(QUERY, spans=[verified(path) for path in spans]).to_pylist()
    shown = [[_brief(value) for value in row.values()] for row in rows[:MOST_SPANS]]
    left = len(rows) - len(shown)
    more = f"\n… and {left} more, in {spans[0].parent}" if left else ""
    return aligned(list(rows[0]), shown) + more


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
            f"{turn['role']} answered: {turn['response'] or 'a tool call'}",
        ]
    return "\n".join(lines)


def _end(question: str) -> str:
    whole = len(question) <= LONGEST_QUESTION
    return question if whole else f"… {question[-LONGEST_QUESTION:]}"
