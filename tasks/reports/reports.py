"""A run → what a person wants to read of it: tables, and transcripts of its rollouts."""

import fcntl
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from adapters.calls import POLICY
from tasks.checkpoints import Ledger
from tasks.evaluations import Score
from tasks.metrics import read_metrics
from tasks.storage.checksums import verified
from tasks.storage.run_folder import policy_folder, policy_names, recipe_of
from tasks.storage.tables import select

QUERY = Path(__file__).with_suffix(".sql").read_text(encoding="utf-8")

METRICS = (
    "reward/mean",
    "reward/std",
    "groups/uniform_fraction",
    "entropy",
    "kl_sample_train_v1",
    "tokens/sampled",
    "tokens/trained",
    "rollouts/failed",
    "prefix/broken",
    "seconds/sampling",
    "seconds/training",
)

SPENT = {"tokens": "tokens", "cost": "USD"}
"""What is shown of a role that no policy answered, and its name in the table."""


@dataclass(frozen=True)
class RunSummary:
    """A run at a glance. `reward` is the mean reward of its last step; None before the first.

    `state` is running (a process has it open), finished, or stopped: it can be continued. An update
    in doubt was under way when it stopped; going on rebuilds the weights before it.
    """

    name: str
    agent: str
    done: int
    steps: int
    reward: float | None
    state: str


def list_runs(root: Path) -> list[RunSummary]:
    """The runs in a folder, by name."""
    return [_summary(manifest.parent) for manifest in sorted(root.glob("*/manifest.json"))]


def runs_table(root: Path) -> str:
    """The runs in a folder, for a terminal."""
    runs = [list(astuple(run)) for run in list_runs(root)]
    if not runs:
        return f"{root} holds no runs yet; `ratchet train` makes one"
    names = ["run", "agent", "steps", "of", "reward", "state"]
    return aligned(names, runs)


def scores_table(scores: Mapping[str, Score]) -> str:
    """An evaluation for a terminal: a line for each way of sampling, and one for each category.

    The reward is over finished rollouts, with the interval that holds it with 95 % confidence. Of
    each role that no policy answered stand the tokens, and what they cost where that is known.
    """
    names = ["played", "category", "examples", "failed", "reward", "95 % interval"]
    spent = _columns(scores.values())
    rows = []
    for how, whole in scores.items():
        for category, score in {"all": whole, **whole.categories}.items():
            known = score.finished
            between = " to ".join(f"{bound:.3g}" for bound in known.interval or ()) or None
            row = [how, category, known.examples, score.failed, known.mean, between]
            rows.append([*row, *(_spent(score, *column) for column in spent)])
    return aligned([*names, *(f"{role} {SPENT[what]}" for role, what in spent)], rows)


def aligned(names: Sequence[str], cells: Iterable[Sequence[object]]) -> str:
    """A table for a terminal; None is a dash."""
    rows = [names, *([_number(cell) for cell in row] for row in cells)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(names))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def metrics_table(metrics: Path, names: Sequence[str] = METRICS) -> str:
    """metrics.jsonl as Markdown, a line a step; names that no step has are left out."""
    rows = read_metrics(metrics)
    shown = ["step", *(name for name in names if any(name in row for row in rows))]
    return _markdown(shown, ([_number(row.get(name)) for name in shown] for row in rows))


def transcripts(spans: Path) -> str:
    """The best, the middle and the worst rollout of a batch as Markdown, with their rewards.

    Where none has a reward, three that failed, with their errors.
    """
    rollouts = select(QUERY, spans=verified(spans)).to_pylist()
    ended = sorted(
        (rollout for rollout in rollouts if rollout["reward"] is not None),
        key=lambda rollout: (-rollout["reward"], rollout["rollout_id"]),
    )
    if not ended:
        return "\n".join(_transcript("failed", rollout) for rollout in rollouts[:3])
    chosen = {len(ended) // 2: "middle"} | {len(ended) - 1: "worst"} | {0: "best"}
    return "\n".join(_transcript(chosen[place], ended[place]) for place in sorted(chosen))


def _summary(folder: Path) -> RunSummary:
    recipe, rows = recipe_of(folder), read_metrics(folder / "metrics.jsonl")
    steps, done = recipe["steps"], len(rows)
    state = "running" if _is_open(folder) else "finished" if done >= steps else _stopped(folder)
    reward = rows[-1].get("reward/mean") if rows else None
    return RunSummary(folder.name, recipe["agent"], done, steps, reward, state)


def _stopped(folder: Path) -> str:
    doubts = []
    for name in policy_names(folder):
        doubtful = Ledger(policy_folder(folder, name) / "checkpoints.jsonl").in_doubt()
        of = "" if name == POLICY else f" of {name}"
        doubts += [] if doubtful is None else [f"update {doubtful - 1}{of} in doubt"]
    return ", ".join(["stopped", *doubts])


def _is_open(folder: Path) -> bool:
    """Whether a process holds the run's lock, which the kernel drops when that process ends."""
    lock = folder / "lock"
    if not lock.exists():
        return False
    with lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _transcript(title: str, rollout: dict[str, Any]) -> str:
    ended = f"reward {_number(rollout['reward'])}"
    if rollout["reward"] is None:
        ended = f"{rollout['error_type']}: {rollout['error_message']}"
    parts = [f"## {title}: {rollout['rollout_id']}\n\n{ended}\n"]
    for conversation in rollout["conversations"]:
        messages = [*json.loads(conversation["messages"]), json.loads(conversation["reply"])]
        if conversation["role"] != "policy":
            parts.append(f"*asked of the {conversation['role']}*\n")
        parts += [f"**{message['role']}**\n\n{_fenced(_text(message))}\n" for message in messages]
    return "\n".join(parts)


def _columns(scores: Collection[Score]) -> list[tuple[str, str]]:
    """The roles, and what is known of each that is not 0."""
    roles = sorted({role for score in scores for role in score.spent})
    every = [(role, what) for role in roles for what in SPENT]
    return [column for column in every if any(_spent(score, *column) for score in scores)]


def _spent(score: Score, role: str, what: str) -> float | None:
    spent = score.spent.get(role)
    return None if spent is None else getattr(spent, what)


def _text(message: dict[str, Any]) -> str:
    """The words of a message, and the tools it calls."""
    words = [message.get("reasoning_content"), message.get("content")]
    calls = [call["function"] for call in message.get("tool_calls") or []]
    lines = [word for word in words if word]
    return "\n".join([*lines, *(f"{call['name']}({call['arguments']})" for call in calls)])


def _fenced(text: str) -> str:
    """A code block that nothing in the text can end."""
    longest = max((len(ticks) for ticks in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def _markdown(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _number(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
