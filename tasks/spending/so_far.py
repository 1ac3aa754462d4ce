"""What a run has spent so far, read as its steps end: each sealed batch and each line once."""

from collections import Counter, defaultdict
from collections.abc import Mapping

import orjson

from ratchet.adapters.tinker.prices import prices_of
from ratchet.tasks.recording.spans import LLM, OURS
from ratchet.tasks.recording.step_log import COST, SPENDING, USD, Metrics, read_metrics_from
from ratchet.tasks.spending.ledger import TOKEN_KINDS
from ratchet.tasks.spending.work_log import add_rest, answered_work, read_rest
from ratchet.tasks.storage.manifest import parent_of, recipe_of
from ratchet.tasks.storage.run_folder import RunFolder
from ratchet.tasks.storage.tables import read_table

CALLED = ("prefill", "cached", "sampled")
CALL_COLUMNS = (
    "kind", "recalled", "run_id", "gen_ai_provider_name", "gen_ai_usage_input_tokens",
    "gen_ai_usage_output_tokens", "attributes",
)  # fmt: skip


class SpentSoFar:
    """Reader of what an open run has spent.

    Tokens are those that were answered. A batch counts when it is sealed, and what is trained or
    scored when it is answered.
    """

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._prices = prices_of(recipe_of(run)["model"]["base"])
        self._known: set[str] = set()
        self._called: Counter[str] = Counter()
        self._told = sum_spent(run)

    def record_rest(self) -> None:
        """Record what was spent since the last step, at the end of the run."""
        add_rest(self._run, self.since_last())

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
            self._called.update(_count_calls(self._run, batch))
            self._known.add(batch)
        worked = answered_work(self._run)
        return {kind: self._called[kind] + worked[kind] for kind in TOKEN_KINDS}


def _count_calls(run: RunFolder, batch: str) -> dict[str, int]:
    """Count the tokens of a sealed batch's answered calls, as the ledger does."""
    tokens: dict[str, int] = dict.fromkeys(CALLED, 0)
    for row in read_table(run.spans(batch), CALL_COLUMNS).to_pylist():
        here = row["run_id"] in (None, run.name) and not row["recalled"]
        if row["kind"] == LLM and row["gen_ai_provider_name"] == OURS and here:
            beside = orjson.loads(row["attributes"])
            cached = beside.get("cached_tokens", 0)
            tokens["cached"] += cached
            tokens["prefill"] += row["gen_ai_usage_input_tokens"] - cached
            tokens["sampled"] += row["gen_ai_usage_output_tokens"] + beside.get("cut_tokens", 0)
    return tokens


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
