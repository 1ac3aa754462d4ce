"""What a service computes for a run beside the calls of agents, and the prices of its tokens.

The prices are in a dated file that ships, or in a newer one that the user names.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

SHIPPED_PRICES = Path(__file__).with_name("prices.json")
PRICES_FILE = "RATCHET_PRICES"
"""Variable that names another file of prices; the service publishes one in the same form."""
CACHED_SHARE = 0.2
"""Price of a cached token of a prompt by that of another one, where the file does not have it."""
MILLION = 1_000_000
KINDS = {"prefill": "prefill", "cached": "cached", "sampled": "sample", "trained": "train"}
"""Kind of tokens → its key in the file."""

_task: ContextVar[str] = ContextVar("task", default="")


@contextmanager
def working_on(task: str) -> Iterator[None]:
    """Have what this block asks of a service counted for a task, such as `updates/00003`."""
    before = _task.set(task)
    try:
        yield
    finally:
        _task.reset(before)


def current_task() -> str:
    return _task.get()


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens of one or several requests that are submitted together.

    `trained` are in forward or backward passes, `prefill` in scored sequences; a scored sequence
    has a token `sampled`, since the API has no request without one.
    """

    trained: int = 0
    prefill: int = 0
    sampled: int = 0


class Meter(Protocol):
    """Meter of a run."""

    def asked(self, task: str, work: Work) -> str:
        """Record work before it is submitted; return the name of the record."""
        ...

    def answered(self, asked: str, cached: int = 0) -> None:
        """Record that work was answered; `cached` tokens of its prefill were in the cache."""
        ...


class Unmetered:
    """Meter that keeps nothing, of a service without a run."""

    def asked(self, task: str, work: Work) -> str:
        return ""

    def answered(self, asked: str, cached: int = 0) -> None:
        pass


@dataclass(frozen=True)
class Prices:
    """Prices of a model's tokens by kind, in US dollars a million; a missing kind has no price."""

    by_kind: dict[str, float]
    date: str

    def missing(self, tokens: Mapping[str, int]) -> list[str]:
        """List the kinds of tokens that have no price."""
        return [kind for kind, count in tokens.items() if count and kind not in self.by_kind]

    def cost(self, tokens: Mapping[str, int]) -> float:
        """Return the price of tokens by kind; those of a kind without a price cost nothing."""
        return sum(count * self.by_kind.get(kind, 0) for kind, count in tokens.items()) / MILLION


def prices_of(model: str) -> Prices | None:
    """Return the prices of a base model; None if the file does not have it."""
    date, models = _read(os.environ.get(PRICES_FILE, ""))
    found = models.get(model.lower())
    return None if found is None else Prices(found, date)


@cache
def _read(named: str) -> tuple[str, dict[str, dict[str, float]]]:
    """Read a file's date and its prices by model: an object of both, or a list of models."""
    content = json.loads((Path(named) if named else SHIPPED_PRICES).read_text(encoding="utf-8"))
    dated: dict[str, Any] = {"models": content} if isinstance(content, list) else content
    prices = {str(row["tinker_id"]).lower(): _prices(row) for row in dated["models"]}
    return str(dated.get("date", "")), prices


def _prices(row: dict[str, Any]) -> dict[str, float]:
    given = {kind: row.get(key) for kind, key in KINDS.items()}
    found = {
        kind: float(str(price).lstrip("$").replace(",", ""))
        for kind, price in given.items()
        if price is not None
    }
    if "prefill" in found:
        found.setdefault("cached", found["prefill"] * CACHED_SHARE)
    return found
