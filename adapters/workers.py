"""Workers play the rollouts: they claim what is on offer at the door, and report how it ended.

What is exchanged is JSON over HTTP, behind a token that agents do not have. Prefect 3.8 has two
ways to have work done elsewhere, and neither fits a rollout. The parameters of a deferred task, an
agent's key among them, are pickled into storage that all machines must share; it took a second to
hand one over; and when its worker was killed it stayed Running and went to no other. A flow run of
a work pool begins after seconds, even where it is looked for each second, and keeps its parameters
in clear in the server's database; killed with its worker it stayed Running too. Here a claim takes
milliseconds, and a worker that dies costs the length of a lease. Prefect is asked where the doors
are (`tasks.doors`).
"""

import asyncio
import hmac
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, Field

from adapters.calls import Refused
from adapters.leases import LEASE_SECONDS, Lease, Leases, NoMore
from adapters.players import AgentFailed, Job, PlayerLost, Playing, Written, read_outcome
from adapters.waiting import Wait

POLLS, POLL_SECONDS = 20, 1.0
"""How long a claim waits for an offer, and how often it is looked whether its worker still does."""


class Claim(BaseModel):
    """A worker asks for rollouts."""

    most: int = Field(ge=1)


class Held(BaseModel):
    """The leases that a worker speaks of."""

    leases: list[str]


class End(BaseModel):
    """How a rollout ended, as `players.written_outcome` wrote it."""

    lease: str
    outcome: dict[str, Any]


class Workers:
    """Leaves rollouts to whoever claims them by its `routes`, which the door must have.

    A rollout begins when it is claimed: until then no clock of it runs.
    """

    def __init__(self, agent: str, token: str) -> None:
        self._agent = agent
        self.token = token
        self._leases = Leases()
        self._unclaimed: Wait | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def close(self) -> None:
        """Tell whoever claims that the run has ended."""
        self._leases.close()

    @asynccontextmanager
    async def begun(self, job: Job) -> AsyncIterator[Playing]:
        lease = self._leases.offer(job)
        try:
            await self._claimed(lease)
            yield Playing(lease.worker, self._leases.reward(lease))
        finally:
            self._leases.withdraw(lease)

    async def _claimed(self, lease: Lease) -> None:
        claimed = asyncio.wrap_future(lease.claimed)
        while not claimed.done():
            if self._unclaimed is None:
                what = "a worker to claim a rollout (`ratchet worker` starts one)"
                self._unclaimed = Wait(what, None)
            self._unclaimed.speak()
            await asyncio.wait([claimed], timeout=self._unclaimed.until_next())

    def routes(self) -> APIRouter:
        """What the door answers to workers."""
        router = APIRouter(prefix="/workers", dependencies=[Depends(self._check)])
        router.add_api_route("/agent", self._whom, methods=["GET"])
        router.add_api_route("/{worker}/claim", self._claim, methods=["POST"])
        router.add_api_route("/{worker}/renew", self._renew, methods=["POST"])
        router.add_api_route("/{worker}/end", self._end, methods=["POST"])
        router.add_api_route("/{worker}/leave", self._leave, methods=["POST"])
        return router

    def _check(self, request: Request) -> None:
        given = request.headers.get("authorization", "").encode()
        if not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
            text = "The token is not this run's; set RATCHET_TOKEN alike for run and worker."
            raise Refused(401, text, code="invalid_token")

    async def _whom(self) -> Written:
        return {"agent": self._agent, "lease_seconds": LEASE_SECONDS}

    async def _claim(self, worker: str, claim: Claim, request: Request) -> Written:
        leases: list[Lease] = []
        for _ in range(POLLS):
            try:
                leases = await self._leases.claim(worker, claim.most, POLL_SECONDS)
            except NoMore:
                raise Refused(410, "The run has ended.", code="run_ended") from None
            if await request.is_disconnected():
                self._leases.leave(worker, [lease.id for lease in leases])
                break
            if leases:
                self._unclaimed = None
                break
        return {"rollouts": [_handed_over(lease, request) for lease in leases]}

    async def _renew(self, worker: str, held: Held) -> Written:
        return {"over": self._leases.renew(worker, held.leases)}

    async def _end(self, worker: str, end: End) -> Written:
        try:
            outcome = read_outcome(end.outcome)
        except (AgentFailed, PlayerLost) as error:
            outcome = error
        return {"counts": self._leases.end(worker, end.lease, outcome)}

    async def _leave(self, worker: str, held: Held) -> Written:
        self._leases.leave(worker, held.leases)
        return {}


def _handed_over(lease: Lease, request: Request) -> Written:
    """The door's address is the one by which the worker has found it."""
    written = lease.job.written()
    for endpoint in written["endpoints"].values():
        path = urlsplit(endpoint["base_url"]).path
        endpoint["base_url"] = f"{request.url.scheme}://{request.url.netloc}{path}"
    return {"lease": lease.id, "job": written}
