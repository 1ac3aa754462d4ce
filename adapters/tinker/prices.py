"""Prices of a service's tokens: a dated file that ships, or a newer one that the user names."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ratchet.adapters.errors import UserError

SHIPPED_PRICES = Path(__file__).with_name("prices.json")
PRICES_FILE = "RATCHET_PRICES"
"""Variable that names another file of prices; the service publishes one in the same form."""
CACHED_SHARE = 0.2
"""Price of a cached token of a prompt by that of another one, where the file does not have it."""
MILLION = 1_000_000
KINDS = {"prefill": "prefill", "cached": "cached", "sampled": "sample", "trained": "train"}
"""Kind of tokens → its key in the file."""


class PricesRefused(UserError):
    """Refusal of a file of prices that cannot be read."""


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
    path = Path(named) if named else SHIPPED_PRICES
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        rows, date = (content, "") if isinstance(content, list) else _dated(content)
        return date, {str(row["tinker_id"]).lower(): _prices(row) for row in rows}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PricesRefused(
            f"the prices in {path} cannot be read ({type(error).__name__}: {error}). Name a file "
            f"in the form of {SHIPPED_PRICES}, or unset {PRICES_FILE}"
        ) from error


def _dated(content: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    return content["models"], str(content.get("date", ""))


def _prices(row: dict[str, Any]) -> dict[str, float]:
    given = {kind: row.get(key) for kind, key in KINDS.items()}
    found = {kind: _dollars(price) for kind, price in given.items() if price is not None}
    if "prefill" in found:
        found.setdefault("cached", found["prefill"] * CACHED_SHARE)
    return found


def _dollars(price: object) -> float:
    dollars = float(str(price).lstrip("$").replace(",", ""))
    if not 0 <= dollars < float("inf"):
        raise ValueError(f"a price is {price!r}")
    return dollars
