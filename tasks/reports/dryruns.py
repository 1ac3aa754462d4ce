"""A batch that was played and not trained on → what a person wants to see of it."""

from collections.abc import Mapping
from pathlib import Path

from adapters.calls import POLICY
from tasks.reports.drift import read_drift
from tasks.reports.games import Game, read_games
from tasks.reports.reports import aligned
from tasks.storage.checksums import verified
from tasks.storage.tables import arrays, read, select

QUERY = Path(__file__).with_suffix(".sql").read_text(encoding="utf-8")
MOST_SPANS = 40
WIDEST = 48
LONGEST_QUESTION = 240

Made = Mapping[str, tuple[Path, Path]]
"""Policy → the trajectories and the datums that were made of a batch for it."""


def describe(spans: Path, made: Made) -> str:
    """The spans, the drift, the rewards, the datums and one transcript."""
    games = read_games(spans)
    drifts = [drift for trajectories, _ in made.values() for drift in read_drift(trajectories)]
    parts = {
        "spans": _spans(spans),
        "drift": "\n".join(map(str, drifts)) or "no rollout has a reward",
        "rewards": _rewards(games),
        "datums": "\n".join(_datums(name, *files) for name, files in made.items()),
        "transcript": _transcript(games),
    }
    return "\n\n".join(f"# {title}\n\n{text}" for title, text in parts.items())


def _spans(spans: Path) -> str:
    rows = select(QUERY, spans=verified(spans)).to_pylist()
    shown = [[_brief(value) for value in row.values()] for row in rows[:MOST_SPANS]]
    left = len(rows) - len(shown)
    more = f"\n… and {left} more, in {spans}" if left else ""
    return aligned(list(rows[0]), shown) + more


def _brief(value: object) -> object:
    """One line of a text, short enough for a table."""
    if not isinstance(value, str):
        return value
    line = " ".join(value.split())
    return line if len(line) <= WIDEST else f"{line[: WIDEST - 1]}…"


def _rewards(games: list[Game]) -> str:
    """By group, for they are compared within it: where all are alike, nothing is learnt."""
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
    """Of the best rollout, or of one that failed: the end of each question, and each answer."""
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
