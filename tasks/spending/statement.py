"""What a run has cost: its ledger, beside the service's own count if that was asked for."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tasks.spending.ledger import TokenLedger, read_ledger
from tasks.storage.run_folder import RunFolder


@dataclass(frozen=True)
class Costs:
    """The ledger of a run and, if it was asked for, the service's count of the same tokens."""

    run: str
    ledger: TokenLedger
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


def _prompts_in_one(tokens: Mapping[str, int]) -> dict[str, int]:
    prompts = tokens["prefill"] + tokens["cached"]
    return {"prompts": prompts, "sampled": tokens["sampled"], "trained": tokens["trained"]}
