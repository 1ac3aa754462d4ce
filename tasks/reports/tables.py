"""Tables for a terminal or in Markdown: of runs, and of the scores of evaluations."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass

from adapters.calls import POLICY
from tasks.checkpoints import Ledger
from tasks.evaluations import Score
from tasks.metrics import read_metrics
from tasks.reports.failures import last_failure
from tasks.storage.checksums import Damaged
from tasks.storage.manifest import recipe_of
from tasks.storage.run_folder import RunError, RunFolder, all_runs, runs_root

SPENT = {"tokens": "tokens", "cost": "USD"}
"""Usage of a role that no policy answers → its name in the table."""


@dataclass(frozen=True)
class RunLine:
    """A run in the list of runs. `reward` is the mean reward of its last step, if it has one.

    `failed` rollouts of all its steps trained nothing. `state` is running (a process has it open),
    finished, stopped (it can be continued), damaged, or of another format (another version of
    Ratchet wrote it). An update in doubt was under way when the run stopped; continuing rebuilds
    the weights before it.
    """

    name: str
    agent: str
    done: int
    steps: int
    reward: float | None
    failed: int
    state: str


def list_runs() -> list[RunLine]:
    return [_describe_run(run) for run in all_runs()]


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
    spent = [
        (role, what)
        for role in sorted({role for score in scores.values() for role in score.spent})
        for what in SPENT
        if any(_spent(score, role, what) for score in scores.values())
    ]
    rows: list[list[object]] = []
    for how, whole in scores.items():
        for category, score in {"all": whole, **whole.categories}.items():
            known = score.finished
            interval = " to ".join(f"{bound:.3g}" for bound in known.interval or ()) or None
            row = [how, category, known.examples, score.failed, known.mean, interval]
            rows.append([*row, *(_spent(score, *column) for column in spent)])
    return [*names, *(f"{role} {SPENT[what]}" for role, what in spent)], rows


def aligned(names: Sequence[str], cells: Iterable[Sequence[object]]) -> str:
    """Align cells as a table for a terminal; None is a dash."""
    rows = [names, *([_cell(value) for value in row] for row in cells)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def markdown_table(names: Sequence[str], cells: Iterable[Sequence[object]]) -> str:
    """Return cells as a table in Markdown; None is a dash."""
    rows = ([_cell(value).replace("|", "\\|") for value in row] for row in cells)
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _describe_run(run: RunFolder) -> RunLine:
    try:
        recipe = recipe_of(run)
    except (RunError, Damaged) as error:
        state = "damaged" if isinstance(error, Damaged) else "of another format"
        return RunLine(run.name, "-", 0, 0, None, 0, state)
    rows = read_metrics(run.metrics)
    steps, done = recipe["steps"], len(rows)
    state = "running" if run.is_open() else "finished" if done >= steps else _stopped(run)
    reward = rows[-1].get("reward/mean") if rows else None
    failed = sum(int(row.get("rollouts/failed", 0)) for row in rows)
    agent = recipe.get("agent") or recipe["flow"]
    return RunLine(run.name, agent, done, steps, reward, failed, state)


def _last_error(run: RunFolder) -> str:
    try:
        error = last_failure(run)
    except Damaged as damage:
        return str(damage)
    return error and f"{run.name}, {error}"


def _stopped(run: RunFolder) -> str:
    doubts = ["stopped"]
    for policy in run.policies():
        of = "" if policy == POLICY else f" of {policy}"
        if (doubtful := Ledger(run.checkpoints(policy)).in_doubt()) is not None:
            doubts.append(f"update {doubtful - 1}{of} in doubt")
    return ", ".join(doubts)


def _spent(score: Score, role: str, what: str) -> float | None:
    return getattr(score.spent.get(role), what, None)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
