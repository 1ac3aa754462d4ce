"""The ledger of a run: every token that it had a service compute, by purpose and by use."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from ratchet.adapters.calls import POLICY
from ratchet.adapters.tinker.prices import Prices, prices_of
from ratchet.tasks.recording.journal import read_spans
from ratchet.tasks.recording.spans import SPAN_SCHEMA
from ratchet.tasks.recording.views import open_views
from ratchet.tasks.spending.work_log import read_work
from ratchet.tasks.storage.manifest import ancestors, recipe_of
from ratchet.tasks.storage.names import EXAMINER, JUDGE, BatchName, parse_batch
from ratchet.tasks.storage.run_folder import RunFolder
from ratchet.tasks.storage.tables import query_beside

QUERY = query_beside(__file__)
TOKEN_KINDS = ("prefill", "cached", "sampled", "trained")
"""Kinds of tokens: of prompts, those of them that were in a cache, of answers, of training."""
USED, REPEATED, UNANSWERED = "used", "repeated", "not answered"
PURPOSES = {"train": "rollouts", JUDGE: "judge", EXAMINER: "judge"}
"""Split → what its calls are for; all other splits are evaluations."""
TASK = re.compile(r"(?:policies/(?P<policy>[^/]+)/)?(?P<stage>[^/]+)/(?P<step>\d+)?.*")


@dataclass(frozen=True)
class SpentTokens:
    """Tokens of one purpose, role, step and use; a helper's have the `cost` that LiteLLM gives.

    What was `not answered` may not have been computed: its tokens are the most that it can be.
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


def read_calls(
    run: RunFolder, played: Callable[[BatchName], bool] = lambda _: True
) -> Iterator[SpentTokens]:
    """Yield the calls of agents and judges, of the batches for which `played` is true."""
    with open_views([run], ("spans",), played) as views:
        views.register("aside", _set_aside(run, played))
        found = views.sql(QUERY, params={"ancestors": ancestors(run)}).to_arrow_table().to_pylist()
    for row in found:
        tokens = {kind: row.get(kind, 0) for kind in TOKEN_KINDS}
        purpose = PURPOSES.get(row["split"].partition(".")[0], "evaluation")
        cost = row["cost"] if not row["ours"] else None
        yield SpentTokens(
            purpose, row["role"], row["step"], row["use"], row["calls"], tokens, row["ours"], cost
        )


def _set_aside(run: RunFolder, played: Callable[[BatchName], bool]) -> pa.Table:
    """Read the journals of batches that were played again from the beginning."""
    journals = run.journals_set_aside()
    tables = [read_spans(path) for batch, path in journals if played(parse_batch(batch))]
    spans = pa.concat_tables([SPAN_SCHEMA.empty_table(), *tables])
    return spans.add_column(0, "run", pa.array([run.name] * len(spans), pa.string()))


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
        purpose, role, step = _parse_task(task.removeprefix(f"{run.path.name}/"))
        yield SpentTokens(
            purpose, role, step, use, requests, {kind: total[kind] for kind in TOKEN_KINDS}
        )


def _parse_task(task: str) -> tuple[str, str, int | None]:
    named = TASK.fullmatch(task)
    if named is None:
        return task, POLICY, None
    step = named["step"]
    return named["stage"], named["policy"] or POLICY, None if step is None else int(step)
