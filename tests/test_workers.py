"""At the door: what a worker needs, what it is handed, and what becomes of it when either goes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from adapters import leases
from adapters.agents import Endpoint
from adapters.calls import POLICY, Refused
from adapters.dialects import refuse
from adapters.loopback import LoopbackServer
from adapters.players import AgentFailed, Job, PlayerLost
from adapters.rewards import Reward
from adapters.worker import DoorGone, WorkerRefused, serve
from adapters.workers import Workers

TOKEN = "a-token-of-the-run"
ENDPOINTS = {POLICY: Endpoint("http://127.0.0.1:1/rollout/train-00000-0000-00/v1", "key", POLICY)}
AGENT = "tests.player_agent:play"


@asynccontextmanager
async def team(token: str = TOKEN) -> AsyncIterator[tuple[Workers, str, "asyncio.Task[None]"]]:
    """A run's player, its door's address, and one worker there."""
    player, app = Workers(AGENT, TOKEN), FastAPI()
    app.include_router(player.routes())
    app.add_exception_handler(Refused, refuse)
    server = LoopbackServer(app)
    server.start()
    address = f"http://localhost:{server.port}"
    worker = asyncio.create_task(serve(address, token, concurrency=4, processes=1))
    try:
        yield player, address, worker
    finally:
        worker.cancel()
        await asyncio.wait([worker])
        server.stop()


async def reward_of(player: Workers, alone: bool = False, **example: Any) -> Reward:
    async with player.begun(Job(example, ENDPOINTS, alone)) as playing:
        return await playing.reward


async def until(true: Callable[[], Any]) -> None:
    while not true():
        await asyncio.sleep(0.01)


def run(story: Callable[[Workers, str, "asyncio.Task[None]"], Awaitable[None]]) -> None:
    async def told() -> None:
        async with team() as (player, address, worker):
            await story(player, address, worker)

    asyncio.run(told())


def test_a_worker_plays_what_it_claims_and_finds_the_door_where_it_came_from() -> None:
    async def story(player: Workers, address: str, _: "asyncio.Task[None]") -> None:
        rewards = (reward_of(player, does="return", reward=number) for number in range(9))
        assert await asyncio.gather(*rewards) == [Reward(float(number)) for number in range(9)]
        with pytest.raises(AgentFailed, match=f"'{address}/rollout/train-00000-0000-00/v1'"):
            await reward_of(player, does="raise")

    run(story)


def test_an_agent_that_ends_its_process_ends_no_worker() -> None:
    async def story(player: Workers, _: str, worker: "asyncio.Task[None]") -> None:
        with pytest.raises(PlayerLost, match="ended by signal 9") as lost:
            await reward_of(player, does="die")
        assert lost.value.alone
        with pytest.raises(AgentFailed, match="alone there") as failed:
            await reward_of(player, does="die", alone=True)
        assert failed.value.kind == "AgentExit"
        assert await reward_of(player, does="return", reward=1) == Reward(1.0)
        assert not worker.done()

    run(story)


def test_a_rollout_that_is_out_of_time_is_cancelled_at_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "LEASE_SECONDS", 0.3)
    flag = tmp_path / "flag"

    async def story(player: Workers, _: str, worker: "asyncio.Task[None]") -> None:
        hanging = asyncio.create_task(reward_of(player, does="hang", flag=str(flag)))
        await until(flag.exists)
        hanging.cancel()
        await until(lambda: not flag.exists())
        assert not worker.done()

    run(story)


def test_a_worker_that_is_stopped_gives_back_what_it_plays(tmp_path: Path) -> None:
    flag = tmp_path / "flag"

    async def story(player: Workers, _: str, worker: "asyncio.Task[None]") -> None:
        hanging = asyncio.create_task(reward_of(player, does="hang", flag=str(flag)))
        await until(flag.exists)
        worker.cancel()
        with pytest.raises(PlayerLost, match="has left") as lost:
            await hanging
        assert not lost.value.alone

    run(story)


def test_a_worker_that_waits_for_rollouts_is_told_that_the_run_has_ended() -> None:
    async def story(player: Workers, _: str, worker: "asyncio.Task[None]") -> None:
        assert await reward_of(player, does="return", reward=1.0) == Reward(1.0)
        player.close()
        with pytest.raises(DoorGone, match=r"the run at .* has ended"):
            await worker

    run(story)


def test_a_worker_with_another_token_is_told_what_to_set() -> None:
    async def refused() -> None:
        async with team(token="another") as (_, _, worker):
            with pytest.raises(WorkerRefused, match="set RATCHET_TOKEN alike for run and worker"):
                await worker

    asyncio.run(refused())


def test_where_nobody_answers_workers_the_door_is_gone() -> None:
    server = LoopbackServer(FastAPI())
    server.start()
    with pytest.raises(DoorGone, match="404"):
        asyncio.run(serve(f"http://127.0.0.1:{server.port}", TOKEN, 1, 1))
    server.stop()
    with pytest.raises(DoorGone, match="ConnectError"):
        asyncio.run(serve(f"http://127.0.0.1:{server.port}", TOKEN, 1, 1))
