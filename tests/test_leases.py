"""A rollout is one worker's at a time, and what is said of it by any other does not count."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from adapters import leases
from adapters.agents import Endpoint
from adapters.calls import POLICY
from adapters.leases import Lease, Leases, NoMore
from adapters.players import Job, PlayerLost
from adapters.rewards import Reward

JOB = Job({"name": "a"}, {POLICY: Endpoint("http://door/v1", "key", POLICY)})


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


async def claim(board: Leases, worker: str, most: int = 9) -> list[Lease]:
    return await board.claim(worker, most, seconds=0)


def test_each_offer_goes_to_one_worker_and_no_more_than_it_asks_for() -> None:
    board = Leases()
    offers = [board.offer(JOB) for _ in range(3)]
    assert run(claim(board, "one", 2)) == offers[:2]
    assert run(claim(board, "two")) == offers[2:]
    assert run(claim(board, "two")) == []
    assert [offer.worker for offer in offers] == ["one", "one", "two"]


def test_a_claim_waits_for_an_offer() -> None:
    async def wait() -> None:
        board = Leases()
        claiming = asyncio.create_task(board.claim("one", 1, seconds=60))
        await asyncio.sleep(0)
        offer = board.offer(JOB)
        assert await claiming == [offer]

    run(wait())


def test_a_claim_does_not_wait_where_nothing_will_be_on_offer() -> None:
    async def wait() -> None:
        board = Leases()
        claiming = asyncio.create_task(board.claim("one", 1, seconds=60))
        await asyncio.sleep(0)
        board.close()
        for claim in (claiming, board.claim("two", 1, seconds=60)):
            with pytest.raises(NoMore):
                await claim

    run(wait())


def test_only_the_worker_that_has_a_rollout_can_end_it_and_only_once() -> None:
    async def end() -> None:
        board = Leases()
        offer = board.offer(JOB)
        await claim(board, "one")
        assert not board.end("two", offer.id, Reward(0.5))
        assert board.end("one", offer.id, Reward(1.0))
        assert not board.end("one", offer.id, Reward(2.0))
        assert await board.reward(offer) == Reward(1.0)

    run(end())


def test_a_worker_that_is_not_heard_of_loses_the_rollout_and_one_that_is_keeps_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def expire() -> None:
        board = Leases()
        lost, kept = board.offer(JOB), board.offer(JOB)
        monkeypatch.setattr(leases, "LEASE_SECONDS", 0.0)
        await claim(board, "one")
        monkeypatch.setattr(leases, "LEASE_SECONDS", 600.0)
        assert board.renew("one", [kept.id]) == []
        with pytest.raises(PlayerLost, match="one was not heard of"):
            await board.reward(lost)
        assert board.renew("one", [lost.id, kept.id]) == [lost.id]
        assert not board.end("one", lost.id, Reward(1.0))
        assert board.end("one", kept.id, Reward(1.0))

    run(expire())


def test_a_worker_that_leaves_says_so_and_its_rollouts_are_lost_at_once() -> None:
    async def leave() -> None:
        board = Leases()
        offer = board.offer(JOB)
        await claim(board, "one")
        board.leave("one", [offer.id])
        with pytest.raises(PlayerLost, match="one has left"):
            await board.reward(offer)

    run(leave())


def test_what_is_withdrawn_is_nobodys() -> None:
    board = Leases()
    waiting, playing = board.offer(JOB), board.offer(JOB)
    board.withdraw(waiting)
    assert run(claim(board, "one")) == [playing]
    board.withdraw(playing)
    assert board.renew("one", [playing.id]) == [playing.id]
    assert not board.end("one", playing.id, Reward(1.0))
