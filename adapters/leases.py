"""Rollouts on offer, and leased to whoever plays them: each to one worker at a time."""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock

from adapters.players import Job, PlayerLost, owed
from adapters.rewards import Reward

LEASE_SECONDS = 15.0
"""A worker that is not heard of for so long has lost what it plays; it speaks three times as often.
"""

log = logging.getLogger(__name__)


class NoMore(Exception):
    """Nothing will be on offer any more."""


@dataclass(eq=False)
class Lease:
    """A rollout that was offered; `worker` is whoever plays it."""

    job: Job
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    worker: str = ""
    until: float = 0.0
    claimed: Future[None] = field(default_factory=owed)
    ended: Future[Reward] = field(default_factory=owed)


class Leases:
    """Offers are made on one event loop, and taken on another.

    A worker's lease ends with its result, with a withdrawal, or when the worker is not heard of in
    time. From then on nothing that it says of the rollout counts.
    """

    def __init__(self) -> None:
        self._offers: deque[Lease] = deque()
        self._leased: dict[str, Lease] = {}
        self._news = owed()
        self._closed = False
        self._lock = Lock()

    def offer(self, job: Job) -> Lease:
        """Let any worker take it. It has not begun before it is claimed."""
        lease = Lease(job)
        with self._lock:
            self._offers.append(lease)
        self._tell()
        return lease

    def close(self) -> None:
        """Let nobody wait for an offer any more."""
        self._closed = True
        self._tell()

    async def claim(self, worker: str, most: int, seconds: float) -> list[Lease]:
        """Up to `most` rollouts for the worker: those on offer now, or the first within a time.

        Raises NoMore when the offers are closed.
        """
        deadline = time.monotonic() + seconds
        while True:
            with self._lock:
                news, leases = self._news, self._take(worker, most)
            if self._closed:
                raise NoMore
            left = deadline - time.monotonic()
            if leases or left <= 0:
                return leases
            await asyncio.wait([asyncio.wrap_future(news)], timeout=left)

    def leave(self, worker: str, leases: Iterable[str]) -> None:
        """The worker stops before these have ended: they are lost."""
        for name in leases:
            self.end(worker, name, PlayerLost(f"{worker} has left"))

    def renew(self, worker: str, leases: Iterable[str]) -> list[str]:
        """Which of these are no longer the worker's; the others are, for a while from now."""
        until = time.monotonic() + LEASE_SECONDS
        over = []
        with self._lock:
            for name in leases:
                lease = self._leased.get(name)
                if lease is None or lease.worker != worker:
                    over.append(name)
                else:
                    lease.until = until
        return over

    def end(self, worker: str, name: str, outcome: Reward | Exception) -> bool:
        """Whether it counts: whether the rollout was still the worker's."""
        with self._lock:
            lease = self._leased.get(name)
            if lease is None or lease.worker != worker:
                return False
            del self._leased[name]
        if isinstance(outcome, Exception):
            lease.ended.set_exception(outcome)
        else:
            lease.ended.set_result(outcome)
        return True

    def withdraw(self, lease: Lease) -> None:
        """Nobody wants it any more; whoever plays it will hear of that."""
        with self._lock:
            self._leased.pop(lease.id, None)
            if lease in self._offers:
                self._offers.remove(lease)

    async def reward(self, lease: Lease) -> Reward:
        """As it was reported; PlayerLost if the lease runs out before."""
        ended = asyncio.wrap_future(lease.ended)
        while not ended.done():
            left = lease.until - time.monotonic()
            if left <= 0:
                self._expire(lease)
            await asyncio.wait([ended], timeout=max(left, 0.01))
        return ended.result()

    def _tell(self) -> None:
        """Wake those that wait for an offer."""
        with self._lock:
            news, self._news = self._news, owed()
        news.set_result(None)

    def _take(self, worker: str, most: int) -> list[Lease]:
        leases = [self._offers.popleft() for _ in range(min(most, len(self._offers)))]
        for lease in leases:
            lease.worker, lease.until = worker, time.monotonic() + LEASE_SECONDS
            self._leased[lease.id] = lease
            lease.claimed.set_result(None)
        return leases

    def _expire(self, lease: Lease) -> None:
        text = f"{lease.worker} was not heard of for {LEASE_SECONDS:.0f} s"
        if self.end(lease.worker, lease.id, PlayerLost(text)):
            log.warning("%s; its rollout is played anew", text)
