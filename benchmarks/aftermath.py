"""Comparison of a killed run with an undisturbed one: differences, and repeated work.

All counts are read from the run's journals, ledger and optimizer states, not from its log.
"""

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from safetensors.numpy import load_file

from tasks.journal import read_journal
from tasks.spans import Span

CLOCKS = re.compile(r"(policies/\w+/)?(seconds|replay)/")
LUCK = ("rollouts/retried", "calls/lost")
"""Metrics that a kill may change, besides times, because they report the kill."""

STAGES = ("assembly", "update", "metrics")
"""The stages after a step's rollouts."""

Contents = dict[str, Any]


@dataclass(frozen=True)
class Counts:
    """Counts of repeated or lost work."""

    finished_rerun: int
    """Attempts after one that ended with a reward or an error."""
    applied_twice: int
    """Optimizer steps in a saved state beyond the batches that lead to it, summed over states."""
    sampled_twice: int
    """Tokens recorded as sampled for a call whose answer an earlier attempt had recorded."""
    replayed: int
    """Tokens of answers that were given again from the record."""
    lost: int
    """Calls that were begun and whose answer was not recorded when the kill came."""
    rebuilt: int
    """Checkpoints that were made more than once."""


def counts(run: Path) -> Counts:
    spans = [span for path in (run / "journal").glob("*.jsonl") for span in read_journal(path)]
    calls = [span for span in spans if span["kind"] == "llm"]
    made = [[line["step"] for line in saved(home)] for home in homes(run)]
    return Counts(
        finished_rerun=finished_rerun(spans),
        applied_twice=sum(abs(extra) for extra in extra_steps(run).values()),
        sampled_twice=sampled_twice(calls),
        replayed=sum(tokens(span) for span in calls if span.get("replayed")),
        lost=lost(spans),
        rebuilt=sum(len(steps) - len({*steps}) for steps in made),
    )


def finished_rerun(spans: list[Span]) -> int:
    ended: dict[str, int] = {}
    attempts = defaultdict(set)
    for span in spans:
        attempts[span["rollout_id"]].add(span["attempt"])
        if span["kind"] in ("reward", "error"):
            before = ended.get(span["rollout_id"], span["attempt"])
            ended[span["rollout_id"]] = min(before, span["attempt"])
    return sum(attempt > end for name, end in ended.items() for attempt in attempts[name])


def sampled_twice(calls: list[Span]) -> int:
    """Count the tokens of every recorded sampling of a call except the first."""
    sampled = defaultdict(list)
    for span in sorted(calls, key=lambda span: span["attempt"]):
        if not span.get("replayed"):
            sampled[span["rollout_id"], span["role"], span["call"]].append(tokens(span))
    return sum(sum(again) for _, *again in sampled.values())


def lost(spans: list[Span]) -> int:
    def named(kind: str) -> set[tuple[Any, ...]]:
        names = ("rollout_id", "attempt", "role", "call")
        return {tuple(s[name] for name in names) for s in spans if s["kind"] == kind}

    return len(named("begun") - named("llm"))


def tokens(span: Span) -> int:
    return len(span["response_token_ids"])


def extra_steps(run: Path) -> dict[str, int]:
    """Return for each saved state its optimizer steps minus the earlier batches with datums."""
    extra = {}
    for home in homes(run):
        for line in (line for line in saved(home) if line["state"]):
            batches = (home / "datums" / f"{step:05d}.parquet" for step in range(line["step"]))
            wanted = sum(pq.read_metadata(path).num_rows > 0 for path in batches)
            optimizer = load_file(state_folder(run, line["state"]) / "optimizer.safetensors")
            extra[line["state"]] = int(optimizer["step"]) - wanted
    return extra


def contents(run: Path) -> Contents:
    """Read what must be equal to the bit: final states, datums, metrics, evaluations."""
    states = [[line["state"] for line in saved(home) if line["state"]] for home in homes(run)]
    final = [state_folder(run, of_policy[-1]) for of_policy in states]
    return {
        "weights": [_digests(folder, "*.safetensors") for folder in final],
        "datums": [_digests(home / "datums", "*.parquet") for home in homes(run)],
        "metrics": [_without_clocks(row) for row in read_json_lines(run / "metrics.jsonl")],
        "evaluations": _digests(run / "evaluations", "*.json"),
    }


def differences(run: Contents, undisturbed: Contents) -> list[str]:
    """Return the names of the parts that differ."""
    return [name for name in undisturbed if run[name] != undisturbed[name]]


def first_sampled(run: Path, after: float) -> float | None:
    """Return the seconds from `after` (Unix time) to the end of the next sampled call, or None."""
    ends = [
        span["ended"].timestamp()
        for path in (run / "journal").glob("*.jsonl")
        if path.stat().st_mtime >= after
        for span in read_journal(path)
        if span["kind"] == "llm" and not span.get("replayed")
    ]
    return min((end - after for end in ends if end >= after), default=None)


def stage(run: Path) -> str:
    """Return the stage in which a run was killed, from its folder."""
    unsealed = {path.stem for path in (run / "journal").glob("*.jsonl")} - _stems(run / "spans")
    if unsealed:
        return "rollouts" if unsealed.pop().startswith("train") else "evaluation"
    shards = {name for name in _stems(run / "shards") if name.startswith("train")}
    made = [len(shards), *(len(_stems(run / name)) for name in ("datums", "updates"))]
    made.append(len(read_json_lines(run / "metrics.jsonl")))
    for (before, after), name in zip(pairwise(made), STAGES, strict=True):
        if before > after:
            return name
    return "between"


def homes(run: Path) -> list[Path]:
    """Return each policy's folder; the main policy's is the run's own folder."""
    return [run, *sorted(run.glob("policies/*"))]


def saved(home: Path) -> list[dict[str, Any]]:
    """Return the ledger's lines that name a saved checkpoint."""
    lines = read_json_lines(home / "checkpoints.jsonl")
    return [line for line in lines if line.get("phase", "saved") == "saved"]


def state_folder(run: Path, address: str) -> Path:
    """Return the engine's folder of a checkpoint's tensors."""
    found = list((run / "engine" / "tensors").glob(f"{address.removeprefix('tinker://')}.*"))
    if len(found) != 1:
        raise SystemExit(f"{run} has {len(found)} folders of the state {address}")
    return found[0]


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read the complete lines of a file; a missing file has none."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def _digests(folder: Path, pattern: str) -> dict[str, str]:
    return {path.name: sha256(path.read_bytes()).hexdigest() for path in folder.glob(pattern)}


def _without_clocks(row: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in row.items() if not CLOCKS.match(k) and k not in LUCK}


def _stems(folder: Path) -> set[str]:
    return {path.stem for path in folder.glob("*") if not path.name.startswith(".")}
