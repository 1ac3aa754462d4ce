"""Budgets of runs: how much of one is spent, and what somebody has granted beyond the recipe."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ratchet.adapters.errors import UserError
from ratchet.adapters.tinker.costs import PRICES_FILE, prices_of
from ratchet.tasks.settings.run import Budget
from ratchet.tasks.spending.ledger import sum_spent
from ratchet.tasks.spending.work_log import add_grant, read_grant
from ratchet.tasks.storage.manifest import recipe_of
from ratchet.tasks.storage.run_folder import RunFolder

WARNED_AT = 0.8
"""Share of a budget from which a run says how much is spent."""
PRICED = ("prefill", "sampled", "trained")
"""Kinds of tokens that a model must have prices of, to count in dollars."""


class BudgetReached(UserError):
    """End of a run between two steps, since it has spent what it may."""


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
