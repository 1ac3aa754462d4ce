"""What a run will take: tokens by purpose and kind, their price, and the time, as ranges."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from adapters.tinker.prices import Prices
from tasks.spending.ranges import Range, sum_of

ESTIMATED = ("prompts", "sampled", "trained")
"""Kinds of tokens. Which of those of prompts are in a cache is known when they are computed."""


@dataclass(frozen=True)
class EstimatedLine:
    """Tokens of one purpose and role; of a helper, also the price that LiteLLM gives.

    `cached` is the share of the prompts that was in a cache when a few rollouts were played.
    """

    purpose: str
    role: str
    tokens: Mapping[str, Range]
    cached: float = 0.0
    ours: bool = True
    """Whether the Tinker service computes them."""
    helper_cost: Range | None = None

    def scaled(self, factor: float) -> "EstimatedLine":
        tokens = {kind: many * factor for kind, many in self.tokens.items()}
        cost = None if self.helper_cost is None else self.helper_cost * factor
        return replace(self, tokens=tokens, helper_cost=cost)

    def __add__(self, other: "EstimatedLine") -> "EstimatedLine":
        """Add a line of the same purpose and role."""
        tokens = {kind: many + other.tokens[kind] for kind, many in self.tokens.items()}
        prompts = tokens["prompts"].expected
        cached = sum(one.cached * one.tokens["prompts"].expected for one in (self, other))
        costs = [cost for cost in (self.helper_cost, other.helper_cost) if cost is not None]
        cost = sum_of(costs) if len(costs) > 1 else None
        return replace(
            self, tokens=tokens, cached=cached / prompts if prompts else 0.0, helper_cost=cost
        )

    def cost(self, prices: Prices | None) -> Range | None:
        """Return the price, from all prompts in a cache to none; None if it is not known whole."""
        if not self.ours:
            return self.helper_cost
        if prices is None or prices.missing({**self._ends("high", 0), "prefill": 1}):
            return None
        ends = (self._ends("low", 1), self._ends("expected", self.cached), self._ends("high", 0))
        return Range(*map(prices.cost, ends))

    def _ends(self, end: str, cached: float) -> dict[str, int]:
        of = {kind: getattr(many, end) for kind, many in self.tokens.items()}
        prompts = of["prompts"]
        parts = {"prefill": prompts * (1 - cached), "cached": prompts * cached}
        return {kind: round(many) for kind, many in {**parts, **of}.items() if kind != "prompts"}


@dataclass(frozen=True)
class EstimatedRun:
    """Estimate of one run: its lines, its model's prices, and its seconds if they are known.

    `played` counts the rollouts that it was made from.
    """

    run: str
    lines: Sequence[EstimatedLine]
    prices: Prices | None
    seconds: Range | None
    played: int = 0

    def tokens(self) -> dict[str, Range]:
        """Sum the service's tokens by kind."""
        ours = [line for line in self.lines if line.ours]
        return {kind: sum_of(line.tokens[kind] for line in ours) for kind in ESTIMATED}

    def cost(self) -> Range | None:
        costs = [line.cost(self.prices) for line in self.lines]
        known = [cost for cost in costs if cost is not None]
        return sum_of(known) if len(known) == len(costs) else None


@dataclass(frozen=True)
class CostEstimate:
    """Estimate of a recipe: of its run, or of all of its runs."""

    recipe: str
    parts: Sequence[EstimatedRun]

    def tokens(self) -> dict[str, Range]:
        return {kind: sum_of(part.tokens()[kind] for part in self.parts) for kind in ESTIMATED}

    def cost(self) -> Range | None:
        """Return the price of all runs; None if one has none."""
        costs = [part.cost() for part in self.parts]
        known = [cost for cost in costs if cost is not None]
        return sum_of(known) if len(known) == len(costs) else None

    def seconds(self) -> Range | None:
        """Return the time of all runs, one after the other; None if that of one is not known."""
        known = [part.seconds for part in self.parts if part.seconds is not None]
        return sum_of(known) if len(known) == len(self.parts) else None

    def record(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "recipe": self.recipe,
            "confidence": 0.9,
            "runs": [_record(part) for part in self.parts],
            "tokens": _ranges(self.tokens()),
            "cost": _range(self.cost()),
            "seconds": _range(self.seconds()),
        }


def _record(part: EstimatedRun) -> dict[str, Any]:
    lines = [
        {
            "purpose": line.purpose,
            "role": line.role,
            "ours": line.ours,
            "tokens": _ranges(line.tokens),
            "cached_share": line.cached,
            "cost": _range(line.cost(part.prices)),
        }
        for line in part.lines
    ]
    return {
        "run": part.run,
        "lines": lines,
        "tokens": _ranges(part.tokens()),
        "cost": _range(part.cost()),
        "prices_of": part.prices.date if part.prices else None,
        "seconds": _range(part.seconds),
        "played_rollouts": part.played,
    }


def _ranges(of: Mapping[str, Range]) -> dict[str, Any]:
    return {kind: _range(many) for kind, many in of.items()}


def _range(of: Range | None) -> dict[str, float] | None:
    return None if of is None else asdict(of)
