"""Who plays a rollout makes no difference, and one that dies takes nothing along."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adapters import processes
from adapters.agents import AgentExit, Endpoint, load_agent
from adapters.calls import POLICY
from adapters.players import AgentFailed, Here, Job, Player, PlayerLost, PlayersFailed
from adapters.processes import Processes
from adapters.rewards import Reward

AGENT = "tests.player_agent:play"
ENDPOINTS = {POLICY: Endpoint("http://door/v1", "key", POLICY)}


async def reward_of(player: Player, example: dict[str, Any], alone: bool = False) -> Reward:
    async with player.begun(Job(example, ENDPOINTS, alone)) as playing:
        return await playing.reward


async def outcomes(player: Player, *examples: dict[str, Any]) -> list[Reward | BaseException]:
    played = (reward_of(player, example) for example in examples)
    return await asyncio.gather(*played, return_exceptions=True)


@pytest.fixture(scope="module")
def pool() -> Iterator[Processes]:
    with Processes(AGENT, size=1) as pool:
        yield pool


async def until(true: Any) -> None:
    while not true():
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("reward", [0.1, True, {"policy": 1 / 3, "judge": [0.1, -2.5]}])
def test_a_reward_is_the_same_from_another_process(pool: Processes, reward: Any) -> None:
    example = {"does": "return", "reward": reward}
    here = asyncio.run(reward_of(Here(load_agent(AGENT)), example))
    assert asyncio.run(reward_of(pool, example)) == here


def test_rollouts_are_played_in_another_process_and_many_at_a_time(
    pool: Processes, tmp_path: Path
) -> None:
    async def play() -> None:
        flags = [tmp_path / name for name in ("one", "two")]
        hanging = [
            asyncio.create_task(reward_of(pool, {"does": "hang", "flag": str(flag)}))
            for flag in flags
        ]
        await until(lambda: all(flag.exists() for flag in flags))
        meanwhile = await reward_of(pool, {"does": "return"})
        assert meanwhile.value not in (0.0, os.getpid())
        for task in hanging:
            task.cancel()
        await until(lambda: not any(flag.exists() for flag in flags))

    asyncio.run(play())


@pytest.mark.parametrize(
    ("does", "kind", "message"),
    [
        ("raise", "KeyError", "'http://door/v1'"),
        ("exit", "AgentExit", "the agent raised SystemExit(3)"),
        ("return", "RewardError", "the agent returned 'good' as its reward"),
    ],
)
def test_what_an_agent_raises_is_told_as_here(
    pool: Processes, does: str, kind: str, message: str
) -> None:
    example = {"does": does, "reward": "good"}
    with pytest.raises(AgentFailed) as there:
        asyncio.run(reward_of(pool, example))
    with pytest.raises(Exception, match=r".") as here:
        asyncio.run(reward_of(Here(load_agent(AGENT)), example))
    assert (there.value.kind, str(there.value)) == (here.type.__name__, str(here.value))
    assert there.value.kind == kind
    assert message in str(there.value)


def test_a_rollout_that_is_out_of_time_is_cancelled_where_it_is_played(
    pool: Processes, tmp_path: Path
) -> None:
    flag = tmp_path / "flag"

    async def play() -> None:
        hanging = {"does": "hang", "flag": str(flag)}
        async with pool.begun(Job(hanging, ENDPOINTS)) as playing:
            await until(flag.exists)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(playing.reward, 0.01)
        await until(lambda: not flag.exists())

    asyncio.run(play())


def test_a_process_that_dies_is_replaced_and_its_rollouts_are_lost(
    pool: Processes, tmp_path: Path
) -> None:
    async def play() -> None:
        before = await reward_of(pool, {"does": "return"})
        hanging = {"does": "hang", "flag": str(tmp_path / "flag")}
        lost = await outcomes(pool, hanging, {"does": "die"})
        assert all(isinstance(error, PlayerLost) and error.alone for error in lost)
        after = await reward_of(pool, {"does": "return"})
        assert before != after

    asyncio.run(play())


def test_an_agent_that_ends_the_process_in_which_it_is_alone_has_failed(
    pool: Processes, tmp_path: Path
) -> None:
    flag = tmp_path / "flag"
    flag.touch()
    survives = {"does": "die once", "flag": str(flag), "reward": 1.0}

    async def play() -> None:
        before = await reward_of(pool, {"does": "return"})
        with pytest.raises(AgentExit, match=r"it was alone there: process \d+ ended by signal 9"):
            await reward_of(pool, {"does": "die"}, alone=True)
        with pytest.raises(AgentExit, match="ended with code 7"):
            await reward_of(pool, survives, alone=True)
        assert await reward_of(pool, survives, alone=True) == Reward(1.0)
        assert await reward_of(pool, {"does": "return"}) == before

    asyncio.run(play())


def test_a_process_whose_loop_an_agent_blocks_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "HEEDING_SECONDS", 0.1)
    flag = tmp_path / "flag"

    async def play() -> None:
        with Processes(AGENT, size=1) as pool:
            blocking = asyncio.create_task(reward_of(pool, {"does": "block", "flag": str(flag)}))
            await until(flag.exists)
            beside = asyncio.create_task(reward_of(pool, {"does": "return"}))
            blocking.cancel()
            with pytest.raises(PlayerLost, match="ended by signal 9"):
                await beside

    asyncio.run(play())


def test_an_agent_that_cannot_be_loaded_there_fails_all() -> None:
    async def play() -> None:
        with Processes("tests.no_such_agent:play", size=1) as pool:
            with pytest.raises(PlayersFailed, match="cannot load the agent: AgentError: no agent"):
                await pool.loaded()
            with pytest.raises(PlayersFailed):
                await reward_of(pool, {})

    asyncio.run(play())
