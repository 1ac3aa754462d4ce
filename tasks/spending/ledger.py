"""The ledger of a run: every token that it had a service compute; and the budget that bounds it."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from ratchet.adapters.calls import POLICY
from ratchet.adapters.errors import UserError
from ratchet.adapters.tinker.costs import PRICES_FILE, Prices, prices_of
from ratchet.tasks.recording.spans import (
    UNANSWERED,
    USED,
    Span,
    count_tokens,
    read_tokens,
    rows_of,
)
from ratchet.tasks.recording.step_log import COST, SPENDING, USD, Metrics, read_metrics_from
from ratchet.tasks.settings.run import Budget
from ratchet.tasks.spending.work_log import (
    add_grant,
    answered_work,
    read_grant,
    read_rest,
    read_work,
)
from ratchet.tasks.storage.manifest import ancestors, parent_of, recipe_of
from ratchet.tasks.storage.names import EXAMINER, JUDGE, parse_batch
from ratchet.tasks.storage.run_folder import RunFolder

TOKEN_KINDS = ("prefill", "cached", "sampled", "trained")
"""Kinds of tokens: of prompts, those of them that were in a cache, of answers, of training."""
REPEATED = "repeated"
PURPOSES = {"train": "rollouts", JUDGE: "judge", EXAMINER: "judge"}
"""Split → what its calls are for; all other splits are evaluations."""
WARNED_AT = 0.8
"""Share of a budget from which a run says how much is spent."""
PRICED = ("prefill", "sampled", "trained")
"""Kinds of tokens that a model must have prices of, to count in dollars."""

TASK = re.compile(r"(?:policies/(?P<policy>[^/]+)/)?(?P<stage>[^/]+)/(?P<step>\d+)?.*")


@dataclass(frozen=True)
class SpentTokens:
    """Tokens of one purpose, role, step and use; a helper's have the `cost` that LiteLLM gives.

    `not answered`: an upper bound; the service may have computed none of it.
    """

    purpose: str
    role: str
    step: int | None
    use: str
    requests: int
    tokens: Mapping[str, int]
    ours: bool = True
    """Whether the Tinker service computed them."""
    cost: float | None = None
    """US dollars; None without a price."""


@dataclass(frozen=True)
class TokenLedger:
    """Ledger of a run: what it has spent, and the prices of its model if they are known."""

    run: str
    rows: Sequence[SpentTokens]
    prices: Prices | None

    def tokens(self, *, answered: bool) -> dict[str, int]:
        """Sum the service's tokens by kind: those that were answered, or the others."""
        total: Counter[str] = Counter(dict.fromkeys(TOKEN_KINDS, 0))
        for row in self.rows:
            if row.ours and (row.use != UNANSWERED) == answered:
                total.update(row.tokens)
        return dict(total)

    def cost_of(self, row: SpentTokens) -> float | None:
        """Return the price of a row in US dollars; None if it is not known whole."""
        if not row.ours:
            return row.cost
        if self.prices is None or self.prices.missing(row.tokens):
            return None
        return self.prices.cost(row.tokens)

    def record(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "run": self.run,
            "rows": [{**asdict(row), "cost": self.cost_of(row)} for row in self.rows],
            "tokens": self.tokens(answered=True),
            "not_answered": self.tokens(answered=False),
            "prices_of": self.prices.date if self.prices else None,
        }


def read_ledger(run: RunFolder) -> TokenLedger:
    """Read what a run has spent until now."""
    rows = sorted(
        [*read_calls(run), *read_scored(run)],
        key=lambda row: (row.purpose, row.role, -1 if row.step is None else row.step, row.use),
    )
    return TokenLedger(run.name, rows, prices_of(recipe_of(run)["model"]["base"]))


def read_calls(run: RunFolder) -> Iterator[SpentTokens]:
    """Yield the calls of agents and judges; what an ancestor of the run has asked is not here."""
    sealed, begun, shared = run.sealed_batches(), run.begun_batches(), ancestors(run)
    aside: dict[str, list[Span]] = defaultdict(list)
    for path in run.list_files("stopped", "jsonl"):  # a batch's journal, set aside
        aside[path.stem.rpartition(".")[0]] += _read_rows(path)
    found: dict[tuple[str, int, str, str, bool], Counter[str]] = defaultdict(Counter)
    for batch in sealed | begun | {*aside}:
        if batch in sealed and not (batch in aside and batch in begun):
            tokens = read_tokens(run.spans(batch))
        else:
            spans = _read_rows(run.journal(batch)) if batch in begun else []
            tokens = count_tokens(spans, aside[batch])
        name = parse_batch(batch)
        for (run_id, role, use, ours), sums in tokens.items():
            if run_id not in shared:
                found[name.split, name.step, role, use, ours].update(sums)
    for (split, step, role, use, ours), sums in sorted(found.items(), key=itemgetter(0)):
        purpose = PURPOSES.get(split.partition(".")[0], "evaluation")
        kinds = {kind: sums[kind] for kind in TOKEN_KINDS}
        cost = None if ours else sums.get("cost")
        yield SpentTokens(purpose, role, step, use, sums["calls"], kinds, ours, cost)


def _read_rows(journal: Path) -> list[Span]:
    """Read the rows of a batch that is not sealed."""
    from ratchet.tasks.recording.journal import read_journal  # loads slowly, with Arrow

    return rows_of(read_journal(journal))


def read_scored(run: RunFolder) -> Iterator[SpentTokens]:
    """Yield what was trained and scored; of a task that was done again, all but the last time."""
    rows = [*read_work(run)]
    last = {row["task"]: row["by"] for row in rows if row["answered"]}
    counted: dict[tuple[str, str], Counter[str]] = {}
    for row in rows:
        use = USED if last.get(row["task"]) == row["by"] else REPEATED
        use = use if row["answered"] else UNANSWERED
        total = counted.setdefault((row["task"], use), Counter())
        total.update({kind: row[kind] for kind in TOKEN_KINDS} | {"requests": 1})
    for (task, use), total in counted.items():
        requests = total.pop("requests")
        purpose, role, step = task.removeprefix(f"{run.path.name}/"), POLICY, None
        if (named := TASK.fullmatch(purpose)) is not None:
            purpose, role = named["stage"], named["policy"] or POLICY
            step = None if named["step"] is None else int(named["step"])
        kinds = {kind: total[kind] for kind in TOKEN_KINDS}
        yield SpentTokens(purpose, role, step, use, requests, kinds)


class SpentSoFar:
    """Reader of what an open run has spent.

    A batch counts when it is sealed, and what is trained or scored when it is answered.
    """

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._prices = prices_of(recipe_of(run)["model"]["base"])
        self._shared = ancestors(run)
        self._known: set[str] = set()
        self._called: Counter[str] = Counter()
        self._told = sum_spent(run)

    def since_last(self) -> Metrics:
        """Return what was spent since the last call, or since the last step that was recorded."""
        tokens = self._tokens()
        more = {kind: count - int(self._told.get(kind, 0)) for kind, count in tokens.items()}
        self._told = {**tokens}
        metrics: Metrics = {f"{SPENDING}{kind}": count for kind, count in more.items()}
        if self._prices is not None and not self._prices.missing(more):
            metrics[f"{SPENDING}{USD}"] = self._prices.cost(more)
        return metrics

    def _tokens(self) -> Mapping[str, int]:
        """Sum the tokens by kind; what a batch has taken is read once."""
        for batch in self._run.sealed_batches() - self._known:
            for (run_id, _, use, ours), sums in read_tokens(self._run.spans(batch)).items():
                if ours and use != UNANSWERED and run_id not in self._shared:
                    self._called.update(sums)
            self._known.add(batch)
        worked = answered_work(self._run)
        return {kind: self._called[kind] + worked[kind] for kind in TOKEN_KINDS}


def sum_spent(run: RunFolder, *, but_last: bool = False) -> dict[str, float]:
    """Sum what the run has recorded of itself: tokens by kind, and `usd`.

    The last step is left out if `but_last` says so. The dollars are those of the service and of
    helpers, as far as they have prices.
    """
    shared = (parent_of(run) or {}).get("step", 0)
    total: defaultdict[str, float] = defaultdict(float)
    rows = read_metrics_from(run.metrics, shared)
    for row in [*rows[: len(rows) - but_last], *read_rest(run)]:
        for key, value in row.items():
            if key.startswith((SPENDING, COST)):
                total[USD if key.startswith(COST) else key.removeprefix(SPENDING)] += value
    return dict(total)


@dataclass(frozen=True)
class BudgetSpent:
    """The largest spent share of a limit, and that limit in words; 0 without a budget."""

    share: float
    words: str


def measure_budget(run: RunFolder, budget: Budget, *, but_last: bool = False) -> BudgetSpent:
    """Measure what a run's steps have spent of its budget, or of a larger one that was granted.

    The last step is left out if `but_last` says so.
    """
    limits = budget_of(run, budget).limits()
    if not limits:
        return BudgetSpent(0, "")
    spent = sum_spent(run, but_last=but_last)
    tokens = sum(count for kind, count in spent.items() if kind != "usd")
    amounts = {"usd": spent.get("usd", 0.0), "tokens": tokens}
    shares = {name: amounts[name] / limit for name, limit in limits.items()}
    name = max(shares, key=shares.__getitem__)
    words = f"{_written(name, amounts[name])} of budget.{name} {_written(name, limits[name])}"
    return BudgetSpent(shares[name], words)


def budget_of(run: RunFolder, budget: Budget) -> Budget:
    """Return the recipe's budget, with each limit that was granted since in place of its own."""
    return budget.model_copy(update=read_grant(run))


def check_grant(run: RunFolder, limits: Mapping[str, float]) -> Budget:
    """Return limits as a budget; UserError if a recipe of the run's model may not have it."""
    budget = Budget.model_validate(dict(limits))
    check_priced(budget, recipe_of(run)["model"]["base"])
    return budget


def grant(run: RunFolder, limits: Mapping[str, float]) -> None:
    """Give a run other limits from now on, unless its recipe may not have them (UserError)."""
    add_grant(run, check_grant(run, limits).limits())


def read_limits(given: Sequence[str]) -> dict[str, float]:
    """Read limits as a command has them: `usd=40`, `tokens=2e6`; UserError for anything else."""
    parts = [one.partition("=") for one in given]
    try:
        return Budget.model_validate({name: float(limit) for name, _, limit in parts}).limits()
    except ValueError as error:
        raise UserError(
            f"--budget {' '.join(given)} is no limit of a run: give usd or tokens with a "
            "number above 0, such as usd=40"
        ) from error


def check_priced(budget: Budget, base: str) -> None:
    """Refuse (UserError) a budget in dollars for a model without a price."""
    if budget.usd is not None and (lacking := missing_price(base)):
        raise UserError(
            f"budget.usd is {budget.usd:g}, and {base} has no {lacking}: name a file that has it "
            f"by {PRICES_FILE}, or give budget.tokens"
        )


def missing_price(base: str) -> str:
    """Say which price a model lacks to count in dollars; empty if it has all."""
    if (known := prices_of(base)) is None:
        return "price"
    missing = known.missing(dict.fromkeys(PRICED, 1))
    return f"price of {' and '.join(missing)} tokens" if missing else ""


def _written(name: str, amount: float) -> str:
    return f"{amount:,.0f}" if name == "tokens" else f"${amount:.2f}"
