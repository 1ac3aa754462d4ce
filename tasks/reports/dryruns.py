"""Report of a dry run: its spans, token drift, rewards, datums and one transcript."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from adapters.calls import POLICY
from tasks.recording.views import SPOKEN
from tasks.reports.failures import read_failures
from tasks.reports.tables import aligned
from tasks.reports.transcripts import Transcript, read_transcripts
from tasks.storage.checksums import verified
from tasks.storage.names import parse_rollout
from tasks.storage.tables import arrays, query_beside, read, select

QUERY = SPOKEN + query_beside(__file__)
DRIFT = query_beside(str(Path(__file__).with_name("drift")))
MOST_SPANS = 40
WIDEST = 48
LONGEST_QUESTION = 240


class SpanLine(TypedDict):
    """Span in the list of spans; the columns beside these are for people."""

    prompt: int | None
    prefix: str | None


@dataclass(frozen=True)
class TokenDrift:
    """Token drift of a trained role. A turn is a call with an earlier answer in its messages.

    If the tokens of that answer are not those that were sampled, the trajectory ends; `broken`
    counts such turns by reason (`tasks.trajectories.trajectories_of` names the reasons).
    """

    role: str
    turns: int
    kept: int
    broken: Mapping[str, int]

    def __str__(self) -> str:
        if not self.turns:
            return f"{self.role}: no call had a history"
        reasons = ", ".join(f"{count} by {reason}" for reason, count in self.broken.items())
        return (
            f"{self.role}: {self.kept} of {self.turns} turns kept the tokens that were sampled "
            f"({self.kept / self.turns:.0%}); broken: {reasons or 'none'}"
        )


def describe(
    spans: Sequence[Path],
    trajectories: Mapping[str, Path],
    datums: Mapping[str, Path],
    read_context: int | None = None,
) -> str:
    """Describe the sealed batches of a dry run, and what each policy made of them, by its name.

    `read_context` is the length of the longest text that the model has read.
    """
    rollouts = read_transcripts(spans)
    drifts = [drift for path in trajectories.values() for drift in read_drift(path)]
    parts = {
        "spans": _list_spans(spans, read_context),
        "drift": "\n".join(map(str, drifts)) or "no rollout has a reward",
        "rewards": _list_rewards(rollouts),
        "datums": "\n".join(_count_datums(n, trajectories[n], datums[n]) for n in datums),
        "transcript": _show_best(rollouts),
    }
    return "\n\n".join(f"# {title}\n\n{text}" for title, text in parts.items())


def read_drift(trajectories: Path) -> list[TokenDrift]:
    """Return the drift of every role that is trained, by the role's name."""
    rows = select(DRIFT, trajectories=verified(trajectories))
    return [TokenDrift(**row) for row in rows.to_pylist(maps_as_pydicts="strict")]


def _list_spans(spans: Sequence[Path], read_context: int | None) -> str:
    """List the spans, a line each, and below them the errors, whole."""
    rows: list[SpanLine] = select(QUERY, spans=[verified(path) for path in spans]).to_pylist()
    shown = [[_shorten(value) for value in row.values()] for row in rows[:MOST_SPANS]]
    left = len(rows) - len(shown)
    more = f"\n… and {left} more, in {spans[0].parent}" if left else ""
    below = [_warn_of_long_prompts(rows, read_context), *map(str, read_failures(spans))]
    return "\n\n".join([aligned(list(rows[0]), shown) + more, *filter(None, below)])


def _warn_of_long_prompts(rows: Sequence[SpanLine], read_context: int | None) -> str:
    """Say that prompts are longer than what the model has read; empty if none is."""
    # A prompt of a role that no policy answers has no prefix, and was read by another model.
    longest = max((row["prompt"] or 0 for row in rows if row["prefix"]), default=0)
    if read_context is None or longest <= read_context:
        return ""
    return (
        f"prompts of up to {longest} tokens are beyond the {read_context} that the model has read; "
        "what it answers to them is noise"
    )


def _shorten(value: object) -> object:
    """Shorten a text to one line of a table."""
    if not isinstance(value, str):
        return value
    line = " ".join(value.split())
    return line if len(line) <= WIDEST else f"{line[: WIDEST - 1]}…"


def _list_rewards(rollouts: Sequence[Transcript]) -> str:
    """List the rewards by group; a group with equal rewards trains nothing."""
    groups: dict[str, list[object]] = defaultdict(list)
    for row in rollouts:
        group = parse_rollout(row["rollout_id"]).group
        groups[group].append("failed" if row["error"] else row["reward"])
    columns = max(map(len, groups.values()))
    return aligned(["group", *map(str, range(columns))], [[g, *r] for g, r in groups.items()])


def _count_datums(policy: str, trajectories: Path, datums: Path) -> str:
    trained = [mask.any() for mask in arrays(read(trajectories)["mask"])]
    masks = [mask.sum() for mask in arrays(read(datums)["mask"])]
    called = POLICY if policy == POLICY else f"{POLICY} {policy}"
    return (
        f"{sum(trained)} trajectories of the {called} made {len(masks)} datums, "
        f"in which {sum(masks)} tokens would be trained"
    )


def _show_best(rollouts: Sequence[Transcript]) -> str:
    """Show the best rollout, or a failed one: the end of each question, and each answer."""
    best = max(rollouts, key=lambda row: float("-inf") if row["reward"] is None else row["reward"])
    lines = [f"{best['rollout_id']}, {best['error'] or 'reward ' + format(best['reward'], 'g')}"]
    for turn in best["interactions"]:
        question = turn["question"] or ""
        end = question if len(question) <= LONGEST_QUESTION else f"… {question[-LONGEST_QUESTION:]}"
        lines.append(f"\n{turn['role']} was asked: {end}")
        lines.append(f"{turn['role']} answered: {turn['response']}")
    lines += [f"\n{call['role']} was refused: {call['why']}" for call in best["refused"]]
    return "\n".join(lines)
