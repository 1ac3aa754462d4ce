"""What a run has cost, for people: its ledger by purpose, beside the service's own count."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tasks.reports.tables import aligned
from tasks.spending.ledger import TOKENS, UNANSWERED, Ledger, Spent, read_ledger
from tasks.storage.run_folder import RunFolder


@dataclass(frozen=True)
class Costs:
    """The ledger of a run and, if it was asked for, the service's count of the same tokens."""

    run: str
    ledger: Ledger
    billed: Mapping[str, int] | None
    bill: float | None

    @property
    def unexplained(self) -> dict[str, int] | None:
        """Return the service's count, less what the ledger says, by kind; None without a count.

        What was not answered explains as much as it can be. Tokens of prompts are counted in one
        sum, since only the service knows which of those that were not answered were cached.
        """
        if self.billed is None:
            return None
        billed, answered, lost = (
            _prompts_in_one(tokens)
            for tokens in (
                self.billed,
                self.ledger.tokens(answered=True),
                self.ledger.tokens(answered=False),
            )
        )
        apart = {kind: count - answered[kind] for kind, count in billed.items()}
        return {kind: min(more, 0) + max(more - lost[kind], 0) for kind, more in apart.items()}

    def record(self) -> dict[str, Any]:
        """Return everything as plain values."""
        ledger = self.ledger
        return {
            "run": self.run,
            "rows": [{**asdict(row), "cost": ledger.cost_of(row)} for row in ledger.rows],
            "tokens": ledger.tokens(answered=True),
            "not_answered": ledger.tokens(answered=False),
            "billed": self.billed,
            "unexplained": self.unexplained,
            "bill": self.bill,
            "prices_of": ledger.prices.date if ledger.prices else None,
        }


def read_costs(run: RunFolder, *, billed: bool) -> Costs:
    """Read what a run has spent; if `billed`, ask its service too."""
    ledger = read_ledger(run)
    if not billed:
        return Costs(run.name, ledger, None, None)
    from tasks.spending.bill import read_bill  # imports the SDK

    bill = read_bill(run)
    return Costs(run.name, ledger, bill.tokens, bill.cost)


def describe_costs(costs: Costs) -> str:
    """Return a run's costs as a table for a terminal, and what is left to say below it."""
    names = ["purpose", "role", "use", "requests", *TOKENS, "USD"]
    rows = [*_by_purpose(costs.ledger)]
    total = costs.ledger.tokens(answered=True)
    rows.append(["all answered", None, None, None, *total.values(), _total(costs.ledger)])
    if costs.billed is not None:
        rows.append(["the service's count", None, None, None, *costs.billed.values(), costs.bill])
        apart = [costs.billed[kind] - total[kind] for kind in TOKENS]
        rows.append(["counted beyond that", None, None, None, *apart, None])
    return "\n".join([f"{costs.run}", aligned(names, rows), *_notes(costs)])


def _by_purpose(ledger: Ledger) -> Iterator[list[object]]:
    """Yield a row for each purpose, role and use, of all steps."""
    merged: dict[tuple[str, str, str, bool], list[Spent]] = {}
    for row in ledger.rows:
        merged.setdefault((row.purpose, row.role, row.use, row.ours), []).append(row)
    for (purpose, role, use, _), rows in merged.items():
        tokens = Counter[str](dict.fromkeys(TOKENS, 0))
        for row in rows:
            tokens.update(row.tokens)
        known = [ledger.cost_of(row) for row in rows]
        cost = None if None in known else sum(filter(None, known))
        requests = sum(row.requests for row in rows)
        yield [purpose, role, use, requests, *(tokens[kind] for kind in TOKENS), cost]


def _total(ledger: Ledger) -> float | None:
    known = [ledger.cost_of(row) for row in ledger.rows if row.use != UNANSWERED]
    return None if None in known else sum(filter(None, known))


def _prompts_in_one(tokens: Mapping[str, int]) -> dict[str, int]:
    prompts = tokens["prefill"] + tokens["cached"]
    return {"prompts": prompts, "sampled": tokens["sampled"], "trained": tokens["trained"]}


def _notes(costs: Costs) -> Iterator[str]:
    """Yield sentences about what the table leaves open."""
    ledger = costs.ledger
    if any(ledger.tokens(answered=False).values()):
        yield (
            "What was not answered may have been computed: its tokens are the most that it can be, "
            "and count in no sum."
        )
    if any(apart := (costs.unexplained or {}).values()):
        yield (
            f"The ledger does not explain {sum(map(abs, apart))} tokens of the service's count: "
            "look whether another program has used a session of this run."
        )
    if ledger.prices is None:
        yield "The run's model has no price."
    elif missing := ledger.prices.missing(ledger.tokens(answered=True)):
        yield f"The file of prices has none of {' and '.join(missing)} tokens of the run's model."
    else:
        yield f"Prices are those of {ledger.prices.date or 'the named file'}, without storage."
