"""What a run has cost, or will take, as tables for a terminal."""

from collections import Counter
from collections.abc import Iterator

from adapters.errors import counted
from tasks.reports.tables import aligned
from tasks.spending.estimate import ESTIMATED, CostEstimate, EstimatedRun
from tasks.spending.ledger import TOKEN_KINDS, UNANSWERED, SpentTokens, TokenLedger
from tasks.spending.ranges import Range
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


def describe_estimate(estimate: CostEstimate) -> str:
    """Return an estimate as a table for a terminal, and what is left to say below it."""
    names = ["purpose", "role", *ESTIMATED, "USD"]
    tables = [
        "\n".join([part.run, aligned(names, [*_estimated_rows(part)])]) for part in estimate.parts
    ]
    if len(estimate.parts) > 1:
        total = [*map(_tokens, estimate.tokens().values()), _dollars(estimate.cost())]
        tables.append(aligned(names, [[f"all {len(estimate.parts)} runs", None, *total]]))
    return "\n\n".join(["\n\n".join(tables), "\n".join(_closing_words(estimate))])


def _estimated_rows(part: EstimatedRun) -> Iterator[list[object]]:
    for line in part.lines:
        cost = _dollars(line.cost(part.prices))
        yield [line.purpose, line.role, *map(_tokens, line.tokens.values()), cost]
    yield ["all", None, *map(_tokens, part.tokens().values()), _dollars(part.cost())]


def _tokens(of: Range) -> str:
    ends = [f"{round(end):,}" for end in (of.low, of.high)]
    return ends[0] if ends[0] == ends[1] else f"{round(of.expected):,} ({' to '.join(ends)})"


def _dollars(of: Range | None) -> str | None:
    return None if of is None else f"{of.expected:.2g} ({of.low:.2g} to {of.high:.2g})"


def _closing_words(estimate: CostEstimate) -> Iterator[str]:
    """Yield what the table is made from, the price and the time."""
    played = sum(part.played for part in estimate.parts)
    yield (
        f"In brackets are intervals of 90 %, by {counted(played, 'rollout')} that were played."
        if played
        else "The tokens are those of the data; nothing was played."
    )
    cost = estimate.cost()
    if cost is None:
        yield "price   not known: the file of prices has not all that the model needs"
    else:
        dates = {part.prices.date or "the named file" for part in estimate.parts if part.prices}
        yield (
            f"price   {_dollars(cost)} USD by the prices of {', '.join(sorted(dates))}, from all "
            "prompts in a cache to none, without storage"
        )
    seconds = estimate.seconds()
    if seconds is None:
        yield "time    not known: nothing was played of texts or pairs whose time could be taken"
    else:
        ends = (_duration(end) for end in (seconds.expected, seconds.low, seconds.high))
        yield "time    {} ({} to {}), roughly, on what played the rollouts".format(*ends)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"
