"""The service's own count of what a run has used, by its billing call."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import tinker
from tinker.types import (
    BillingUsageEvent,
    BillingUsageResponse,
    SamplingPrefillBillingEvent,
    SamplingSampleBillingEvent,
    TrainingBillingEvent,
)

from adapters.tinker.metering import RUN_KEY
from adapters.tinker.service import Service, connect
from tasks.spending.ledger import TOKEN_KINDS
from tasks.spending.work_log import run_id
from tasks.storage.manifest import read_manifest, recipe_of
from tasks.storage.run_folder import RunFolder

HOUR = timedelta(hours=1)
LONGEST = timedelta(days=14)
"""Time of which the service tells in one answer."""


@dataclass(frozen=True)
class Bill:
    """Tokens by kind, and the price that the service estimates; None if it prices nothing."""

    tokens: dict[str, int]
    cost: float | None


def read_bill(run: RunFolder) -> Bill:
    """Ask the run's service what the sessions of the run have used; its own engine is started."""
    base, begun = recipe_of(run)["model"]["base"], read_manifest(run)["created"]
    with connect(base, run.engine) as service:
        events = [*_events(service, datetime.fromisoformat(begun), run_id(run))]
    tokens: Counter[str] = Counter(dict.fromkeys(TOKEN_KINDS, 0))
    for event in events:
        kind, count = _kind(event)
        tokens[kind] += count
    tokens.pop("", None)
    costs = [one.estimated_cost_usd for one in events if one.estimated_cost_usd is not None]
    return Bill(dict(tokens), sum(costs) if costs else None)


def _events(service: Service, begun: datetime, run: str) -> Iterator[BillingUsageEvent]:
    """Yield the events of the run's sessions, from the hour in which it has begun."""
    server = service.server
    client = tinker.AdminClient(base_url=server.url, api_key=server.key)
    start = begun.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
    while start < (now := datetime.now(UTC)):
        end = min(start + LONGEST, now.replace(minute=0, second=0, microsecond=0) + HOUR)

        def ask(start: datetime = start, end: datetime = end) -> BillingUsageResponse:
            return client.get_billing_usage(start, end).result()

        answer = service.call("what its sessions have used", ask)
        named = {
            session
            for session, known in answer.sessions.items()
            if (known.user_metadata or {}).get(RUN_KEY) == run
        }
        yield from (event for event in answer.data if event.session_id in named)
        start = end


def _kind(event: BillingUsageEvent) -> tuple[str, int]:
    match event.event_info:
        case TrainingBillingEvent(token_count=count):
            return "trained", count
        case SamplingSampleBillingEvent(token_count=count):
            return "sampled", count
        case SamplingPrefillBillingEvent(cached=cached, token_count=count):
            return "cached" if cached else "prefill", count
    return "", 0
