"""The log of what a run has asked its service for, beside the calls of its agents."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from hashlib import sha256
from secrets import token_hex
from typing import Any

from ratchet.adapters.tinker.costs import Work
from ratchet.tasks.storage.files import JsonRow
from ratchet.tasks.storage.logs import follow
from ratchet.tasks.storage.manifest import read_manifest
from ratchet.tasks.storage.run_folder import RunFolder


class WorkLog:
    """Meter of a run: two lines of work.jsonl for what is submitted together.

    The first comes before the requests, the second with their answers; so a killed run shows what
    its service may have computed for nothing. The lines are in the file when a request leaves, and
    only a crash of the machine can lose them.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._opening = token_hex(4)
        self._log = follow(folder.work, list[JsonRow])

    def asked(self, task: str, work: Work) -> str:
        name, tokens = token_hex(6), asdict(work)
        row = {kind: count for kind, count in tokens.items() if count}
        whose = {"asked": name, "task": task, "by": self._opening, "at": _now()}
        self._log.append({**whose, **row}, synced=False)
        return name

    def answered(self, asked: str, cached: int = 0) -> None:
        self._log.append({"answered": asked, "cached": cached}, synced=False)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def run_id(folder: RunFolder) -> str:
    """Return the run's id: a run made in place of a deleted run has another one."""
    created = read_manifest(folder)["created"]
    return sha256(f"{folder.name}/{created}".encode()).hexdigest()[:16]


def read_work(folder: RunFolder) -> Iterator[dict[str, Any]]:
    """Yield the work of a run, in order: its tokens by kind, and whether it was answered.

    Equal `by` is of one opening of the run; what was begun before a crash has another one.
    """
    rows = _rows(folder)
    cached = {row["answered"]: row["cached"] for row in rows if "answered" in row}
    for row in rows:
        if (name := row.get("asked")) is not None:
            hits = cached.get(name, 0)
            yield {
                "task": row["task"],
                "by": row["by"],
                "trained": row.get("trained", 0),
                "prefill": row.get("prefill", 0) - hits,
                "cached": hits,
                "sampled": row.get("sampled", 0),
                "answered": name in cached,
            }


class _Answered:
    """Sums of the work that was answered, by kind of tokens."""

    def __init__(self) -> None:
        self.tokens: Counter[str] = Counter()
        self._asked: dict[str, JsonRow] = {}

    def append(self, row: JsonRow) -> None:
        if "asked" in row:
            self._asked[row["asked"]] = row
        elif (asked := self._asked.pop(row.get("answered", ""), None)) is not None:
            self.tokens.update({kind: asked.get(kind, 0) for kind in asdict(Work())})
            self.tokens.update({"prefill": -row["cached"], "cached": row["cached"]})


def answered_work(folder: RunFolder) -> Counter[str]:
    """Sum the tokens of a run's answered work by kind; each line is read once by a process."""
    return follow(folder.work, _Answered).ask(lambda rows: Counter(rows.tokens))


def add_grant(folder: RunFolder, limits: Mapping[str, float]) -> None:
    """Record limits of a budget, which hold from now on."""
    row = {"granted": dict(limits), "at": _now()}
    follow(folder.work, list[JsonRow]).append(row)


def add_rest(folder: RunFolder, spent: Mapping[str, float]) -> None:
    """Record what a run has spent after its last step."""
    follow(folder.work, list[JsonRow]).append({"rest": dict(spent)})


def read_rest(folder: RunFolder) -> list[dict[str, float]]:
    """Return what was spent after the last step, each time that the run was ended."""
    return [row["rest"] for row in _rows(folder) if "rest" in row]


def granted_at(folder: RunFolder) -> list[datetime]:
    """Return when limits were granted, for which the run may have waited."""
    return [datetime.fromisoformat(row["at"]) for row in _rows(folder) if "granted" in row]


def read_grant(folder: RunFolder) -> dict[str, float]:
    """Return the limits that were granted, each as it was granted last."""
    granted = (row.get("granted", {}) for row in _rows(folder))
    return {name: limit for limits in granted for name, limit in limits.items()}


def _rows(folder: RunFolder) -> list[JsonRow]:
    return follow(folder.work, list[JsonRow]).ask(list[JsonRow])
