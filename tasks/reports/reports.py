"""Reports of runs: tables for a terminal or Markdown, and transcripts of rollouts."""

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
from tasks.reports.failures import last_failure
from tasks.storage.checksums import Damaged, verified
from tasks.storage.manifest import recipe_of
from tasks.storage.run_folder import RunError, RunFolder, all_runs, runs_root
from tasks.storage.tables import query_beside, select

QUERY = query_beside(__file__)

METRICS = (
    "reward/mean",
    "reward/std",
    "groups/uniform_fraction",
    "entropy",
    "kl_sample_train_v1",
    "tokens/sampled",
    "tokens/trained",
    "rollouts/failed",
    "stragglers/count",
    "stragglers/tokens",
    "stragglers/kept_tokens",
    "prefix/broken",
    "seconds/sampling",
    "seconds/training",
)

MOST_FAILED = 3
"""Failed rollouts that are shown beside the best, the middle and the worst."""

SPENT = {"tokens": "tokens", "cost": "USD"}
"""Usage of a role that no policy answers → its name in the table."""


@dataclass(frozen=True)
class RunLine:
    """A run in the list of runs. `reward` is the mean reward of its last step, if it has one.

    `failed` rollouts of all its steps trained nothing.

    `state` is running (a process has it open), finished, stopped (it can be continued), or the
    format of a run that another version of Ratchet wrote. An update in doubt was under way when
    the run stopped; continuing rebuilds the weights before it.
    """

    name: str
    agent: str
    done: int
    steps: int
    reward: float | None
    failed: int
    state: str


def list_runs() -> list[RunLine]:
    """List the runs, by name."""
    return [_line(run) for run in all_runs()]


def runs_table() -> str:
    """Return the runs as a table for a terminal; below it, whole, the last error of each run."""
    runs = list_runs()
    if not runs:
        return f"{runs_root()} holds no runs yet; `ratchet train` makes one"
    names = ["run", "agent", "steps", "of", "reward", "failed", "state"]
    table = aligned(names, (astuple(run) for run in runs))
    errors = [_last_error(RunFolder(runs_root() / run.name)) for run in runs if run.failed]
    return "\n\n".join([table, *filter(None, errors)])


def scores_table(scores: Mapping[str, Score]) -> str:
    """Return an evaluation as a table for a terminal, as `score_rows` lists it."""
    return aligned(*score_rows(scores))


def score_rows(scores: Mapping[str, Score]) -> tuple[list[str], list[list[object]]]:
    """List scores, each with its categories; return the names of the columns and the rows.

    The reward is over finished rollouts, with its 95 % interval. Each role that no policy answers
    has a column for its tokens and, if their price is known, one for their cost.
    """
    names = ["played", "category", "examples", "failed", "reward", "95 % interval"]
    spent = _columns(scores.values())
    rows: list[list[object]] = []
    for how, whole in scores.items():
        for category, score in {"all": whole, **whole.categories}.items():
            known = score.finished
            between = " to ".join(f"{bound:.3g}" for bound in known.interval or ()) or None
            row = [how, category, known.examples, score.failed, known.mean, between]
            rows.append([*row, *(_spent(score, *column) for column in spent)])
    return [*names, *(f"{role} {SPENT[what]}" for role, what in spent)], rows


def aligned(names: Sequence[str], cells: Iterable[Sequence[object]]) -> str:
    """Align cells as a table for a terminal; None is a dash."""
    rows = [names, *([_number(cell) for cell in row] for row in cells)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(names))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def markdown_table(names: Sequence[str], cells: Iterable[Sequence[object]]) -> str:
    """Return cells as a table in Markdown; None is a dash."""
    rows = ([_number(cell).replace("|", "\\|") for cell in row] for row in cells)
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def transcripts(spans: Sequence[Path]) -> str:
    """Return the best, the middle and the worst rollout of sealed batches as Markdown.

    The first failed rollouts, of up to MOST_FAILED different errors, follow with those errors.
    """
    rollouts = select(QUERY, spans=[verified(path) for path in spans]).to_pylist()
    ended = sorted(
        (rollout for rollout in rollouts if rollout["reward"] is not None),
        key=lambda rollout: (-rollout["reward"], rollout["rollout_id"]),
    )
    chosen = {len(ended) // 2: "middle"} | {len(ended) - 1: "worst"} | {0: "best"}
    shown = [(chosen[place], ended[place]) for place in sorted(chosen)] if ended else []
    failed: dict[str, dict[str, Any]] = {}
    for rollout in rollouts:
        if error := _error(rollout):
            failed.setdefault(error, rollout)
    shown += [("failed", rollout) for rollout in [*failed.values()][:MOST_FAILED]]
    return "\n".join(_transcript(title, rollout) for title, rollout in shown)


def _line(run: RunFolder) -> RunLine:
    try:
        recipe = recipe_of(run)
    except RunError:
        return RunLine(run.name, "-", 0, 0, None, 0, "of another format")
    except Damaged:
        return RunLine(run.name, "-", 0, 0, None, 0, "damaged")
    rows = read_metrics(run.metrics)
    steps, done = recipe["steps"], len(rows)
    state = "running" if run.is_open() else "finished" if done >= steps else _stopped(run)
    reward = rows[-1].get("reward/mean") if rows else None
    failed = sum(int(row.get("rollouts/failed", 0)) for row in rows)
    return RunLine(
        run.name, recipe.get("agent") or recipe["flow"], done, steps, reward, failed, state
    )


def _last_error(run: RunFolder) -> str:
    try:
        error = last_failure(run)
    except Damaged as damage:
        return str(damage)
    return error and f"{run.name}, {error}"


def _stopped(run: RunFolder) -> str:
    doubts = []
    for policy in run.policies():
        doubtful = Ledger(run.checkpoints(policy)).in_doubt()
        of = "" if policy == POLICY else f" of {policy}"
        doubts += [] if doubtful is None else [f"update {doubtful - 1}{of} in doubt"]
    return ", ".join(["stopped", *doubts])


def _transcript(title: str, rollout: dict[str, Any]) -> str:
    ended = _error(rollout) or f"reward {_number(rollout['reward'])}"
    parts = [f"## {title}: {rollout['rollout_id']}\n\n{ended}\n"]
    for conversation in rollout["conversations"]:
        messages = [*json.loads(conversation["messages"]), json.loads(conversation["reply"])]
        if conversation["role"] != "policy":
            parts.append(f"*asked of the {conversation['role']}*\n")
        parts += [f"**{message['role']}**\n\n{_fenced(_text(message))}\n" for message in messages]
    parts += [
        f"*a call of the {call['role']} was refused*\n\n{_fenced(call['why'])}\n"
        for call in rollout["refused"] or ()
    ]
    return "\n".join(parts)


def _error(rollout: dict[str, Any]) -> str:
    """Return the error of a failed rollout; empty if the rollout has a reward, or has not ended."""
    if rollout["reward"] is not None or rollout["error_type"] is None:
        return ""
    return f"{rollout['error_type']}: {rollout['error_message']}"


def _columns(scores: Collection[Score]) -> list[tuple[str, str]]:
    """Return the (role, usage) columns that some score fills."""
    roles = sorted({role for score in scores for role in score.spent})
    every = [(role, what) for role in roles for what in SPENT]
    return [column for column in every if any(_spent(score, *column) for score in scores)]


def _spent(score: Score, role: str, what: str) -> float | None:
    spent = score.spent.get(role)
    return None if spent is None else getattr(spent, what)


def _text(message: dict[str, Any]) -> str:
    """Return the words of a message, and the tools it calls."""
    words = [message.get("reasoning_content"), message.get("content")]
    calls = [call["function"] for call in message.get("tool_calls") or []]
    lines = [word for word in words if word]
    return "\n".join([*lines, *(f"{call['name']}({call['arguments']})" for call in calls)])


def _fenced(text: str) -> str:
    """Fence a text as a code block that nothing in the text can end."""
    longest = max((len(ticks) for ticks in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def _number(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
