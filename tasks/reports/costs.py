"""What a run has cost, as a table for a terminal."""

from collections import Counter
from collections.abc import Iterator

from tasks.reports.tables import aligned
from tasks.spending.ledger import TOKEN_KINDS, UNANSWERED, SpentTokens, TokenLedger
from tasks.spending.statement import Costs

COST_COLUMNS = ("purpose", "role", "use", "requests", *TOKEN_KINDS, "USD")


def describe_costs(costs: Costs) -> str:
    """Return a run's costs as a table for a terminal, and what is left to say below it."""
    rows = [*rows_by_purpose(costs.ledger)]
    total = costs.ledger.tokens(answered=True)
    rows.append(["all answered", None, None, None, *total.values(), _total(costs.ledger)])
    if costs.billed is not None:
        rows.append(["the service's count", None, None, None, *costs.billed.values(), costs.bill])
        apart = [costs.billed[kind] - total[kind] for kind in TOKEN_KINDS]
        rows.append(["counted beyond that", None, None, None, *apart, None])
    return "\n".join([f"{costs.run}", aligned(COST_COLUMNS, rows), *_notes(costs)])


def rows_by_purpose(ledger: TokenLedger) -> Iterator[list[object]]:
    """Yield a row by COST_COLUMNS for each purpose, role and use, of all steps."""
    merged: dict[tuple[str, str, str, bool], list[SpentTokens]] = {}
    for row in ledger.rows:
        merged.setdefault((row.purpose, row.role, row.use, row.ours), []).append(row)
    for (purpose, role, use, _), rows in merged.items():
        tokens = Counter[str](dict.fromkeys(TOKEN_KINDS, 0))
        for row in rows:
            tokens.update(row.tokens)
        known = [ledger.cost_of(row) for row in rows]
        cost = None if None in known else sum(filter(None, known))
        requests = sum(row.requests for row in rows)
        yield [purpose, role, use, requests, *(tokens[kind] for kind in TOKEN_KINDS), cost]


def _total(ledger: TokenLedger) -> float | None:
    known = [ledger.cost_of(row) for row in ledger.rows if row.use != UNANSWERED]
    return None if None in known else sum(filter(None, known))


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
