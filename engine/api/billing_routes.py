"""Route of what sessions have used: tokens by hour, in the form of the service's bills."""

from datetime import datetime, timedelta

import tinker.types
from fastapi import APIRouter

from engine.api.dependencies import TheEngine
from engine.errors import RequestRefused

LONGEST = timedelta(days=14)

router = APIRouter()


@router.get("/billing/usage/events")
async def billing_usage(
    engine: TheEngine, starting_on: datetime, ending_before: datetime
) -> tinker.types.BillingUsageResponse:
    """Return the tokens of the hours in [starting_on, ending_before); nothing here has a price."""
    for name, time in (("starting_on", starting_on), ("ending_before", ending_before)):
        if time.tzinfo is None or time.timestamp() % 3600:
            raise RequestRefused(f"{name} is {time.isoformat()}; give a whole hour, with its zone")
    if not timedelta() < ending_before - starting_on <= LONGEST:
        raise RequestRefused(
            f"the hours from {starting_on.isoformat()} to {ending_before.isoformat()} are none, or "
            f"more than {LONGEST.days} days; ask for the rest in a further request"
        )
    events = engine.usage.events(starting_on, ending_before, engine.base.name)
    named = {event.session_id for event in events if event.session_id is not None}
    found = {one: engine.registry.sessions.get(one) for one in sorted(named)}
    return tinker.types.BillingUsageResponse(
        data=events,
        sessions={
            name: tinker.types.BillingUsageSession(user_metadata=session.user_metadata)
            for name, session in found.items()
            if session is not None
        },
    )
