"""What a run has cost, as a table for a terminal."""

from collections import Counter
from collections.abc import Iterator

from ratchet.tasks.reports.tables import aligned
from ratchet.tasks.spending.ledger import TOKEN_KINDS, UNANSWERED, SpentTokens, TokenLedger

COST_COLUMNS = ("purpose", "role", "use", "requests", *TOKEN_KINDS, "USD")


def describe_costs(ledger: TokenLedger) -> str:
    """Return a run's ledger as a table for a terminal, and what is left to say below it."""
    total = ledger.tokens(answered=True)
    rows = [*rows_by_purpose(ledger)]
    rows.append(["all answered", None, None, None, *total.values(), _total(ledger)])
    return "\n".join([ledger.run, aligned(COST_COLUMNS, rows), *_notes(ledger)])


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


def _notes(ledger: TokenLedger) -> Iterator[str]:
    """Yield sentences about what the table leaves open."""
    if any(ledger.tokens(answered=False).values()):
        yield (
            "What was not answered may have been computed: its tokens are the most that it can be, "
            "and count in no sum."
        )
    if ledger.prices is None:
        yield "The run's model has no price."
    elif missing := ledger.prices.missing(ledger.tokens(answered=True)):
        yield f"The file of prices has none of {' and '.join(missing)} tokens of the run's model."
    else:
        yield f"Prices are those of {ledger.prices.date or 'the named file'}, without storage."
