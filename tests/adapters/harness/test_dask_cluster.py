"""Rollout batches that the workers of a Dask cluster play, on this machine."""

import asyncio
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

pytest.importorskip("distributed", reason="Dask is not installed: make setup")

from ratchet.adapters.errors import PassingError
from ratchet.adapters.harness import dask_cluster
from ratchet.adapters.harness.dask_cluster import DaskCluster, open_cluster, play_while_open
from ratchet.adapters.harness.player import play_batch
from ratchet.adapters.harness.players_door import BatchRefused
from ratchet.adapters.process.event_loop import cancel_and_wait
from tests.support.door.played_shard import AGENT, EXAMPLES, PlayedShard, comparable
from tests.support.processes import free_port, wait_until
from tests.support.servers.dask_by_hand import HandCluster, by_hand
from tests.support.stores.object_store import ObjectStore, line_to

TOKEN = "0123456789abcdef" * 4


@pytest.fixture(scope="module")
def imported_by(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file in which the agent's module logs its imports."""
    return tmp_path_factory.mktemp("imports") / "processes"


@pytest.fixture(scope="module")
def local(imported_by: Path) -> Iterator[DaskCluster]:
    """A cluster of worker processes that we start ourselves, for four batches at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IMPORTED_BY", str(imported_by))
        with open_cluster(None, 4) as cluster:
            yield cluster


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HandCluster]:
    """A cluster by hand with two workers of two threads."""
    with by_hand(tmp_path_factory.mktemp("dask"), {"one": 2, "two": 2}) as cluster:
        yield cluster


@pytest.fixture
def cluster(two_workers: HandCluster) -> Iterator[DaskCluster]:
    """A connection to the cluster by hand, whose workers are all there."""
    two_workers.wait_for_workers(2)
    with open_cluster(two_workers.address, 4) as cluster:
        yield cluster


def test_a_shard_gives_the_same_spans_on_a_cluster_as_in_threads(
    tmp_path: Path, local: DaskCluster
) -> None:
    with PlayedShard(tmp_path / "a" / "run", AGENT, EXAMPLES, batches=1) as shard:
        threads = shard.play(play_batch)
    with PlayedShard(tmp_path / "b" / "run", AGENT, EXAMPLES, batches=4) as shard:
        workers = shard.play(local.play)
    assert len(threads) > 2 * len(EXAMPLES)
    assert comparable(workers) == comparable(threads)


def test_a_worker_imports_the_agent_once(
    tmp_path: Path, local: DaskCluster, imported_by: Path
) -> None:
    for name in ("first", "second"):
        with PlayedShard(tmp_path / name, AGENT, EXAMPLES, batches=4) as shard:
            shard.play(local.play)
    workers = [line for line in imported_by.read_text().split() if line != str(os.getpid())]
    assert 1 <= len(workers) == len({*workers})


@pytest.mark.story
def test_a_poisonous_agent_costs_only_its_own_rollout(tmp_path: Path, cluster: DaskCluster) -> None:
    examples = [{"number": number, "poison": number == 3} for number in range(8)]
    with PlayedShard(tmp_path, AGENT, examples, batches=4) as shard:
        shard.play(cluster.play)
    ends = shard.ends()
    assert len(ends) == len({end["rollout_id"] for end in ends}) == 16
    [failed] = [end for end in ends if end["kind"] == "error"]
    assert (failed["rollout_id"], failed["error_type"]) == ("train-00000-0003-00", "AgentExit")
    assert "ended with exit status 7 without an outcome" in failed["error_message"]
    assert set(shard.sampler.answered.values()) == {1}


@pytest.mark.story
def test_a_killed_worker_costs_nothing_that_had_ended_or_was_sampled(
    tmp_path: Path, cluster: DaskCluster
) -> None:
    players = tmp_path / "players"
    examples = [
        {"number": number, "calls": 2 + 6 * (number % 2), "thinks": 0.3, "player": str(players)}
        for number in range(8)
    ]
    with (
        PlayedShard(tmp_path / "run", AGENT, examples, batches=4) as shard,
        ThreadPoolExecutor(1) as thread,
    ):
        playing = thread.submit(shard.play, cluster.play)
        wait_until("four ends", lambda: len(shard.ends()) >= 4)
        before = {end["span_id"] for end in shard.ends()}
        os.kill(int(players.read_text().split()[0]), signal.SIGKILL)
        playing.result()
    ends = shard.ends()
    assert len(ends) == len({end["rollout_id"] for end in ends}) == 16
    assert {end["kind"] for end in ends} == {"reward"}
    assert before <= {end["span_id"] for end in ends}
    assert len({end["attempt"] for end in ends}) > 1
    assert set(shard.sampler.answered.values()) == {1}


def test_a_token_opens_no_other_batch_from_a_worker(tmp_path: Path, cluster: DaskCluster) -> None:
    with PlayedShard(tmp_path, AGENT, EXAMPLES, batches=2) as shard:

        async def swapped(door: str, batch: str, token: str) -> None:
            await cluster.play(door, batch, shard.door.token("another batch"))

        with pytest.raises(BatchRefused, match="does not open this path"):
            shard.play(swapped)


def test_a_worker_leaves_a_batch_whose_door_was_lost_with_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dask_cluster, "DOOR_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(dask_cluster, "SILENT_SECONDS", 0.5)
    with (
        PlayedShard(tmp_path, AGENT, [{"number": 0, "thinks": 600}], batches=1) as shard,
        line_to(ObjectStore(urlsplit(shard.door.address).port or 0)) as line,
    ):

        async def lost(_: str, batch: str, token: str) -> None:
            near = f"http://127.0.0.1:{line.port}"
            playing = asyncio.create_task(play_while_open(near, batch, token))
            while not shard.sampler.answered:
                await asyncio.sleep(0.05)
            line.delay = 3600  # nothing comes through, and no connection is closed
            await playing

        with pytest.raises(httpx.ReadTimeout):
            shard.play(lost)
    assert shard.ends() == []


def test_a_worker_leaves_a_batch_that_its_door_has_opened_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dask_cluster, "DOOR_LOOK_SECONDS", 0.1)
    with PlayedShard(tmp_path, AGENT, [{"number": 0, "thinks": 600}], batches=1) as shard:

        async def closed(door: str, batch: str, token: str) -> None:
            playing = asyncio.create_task(play_while_open(door, batch, token))
            while not shard.sampler.answered:
                await asyncio.sleep(0.05)
            shard.door._openings[batch] += 1  # as a door does that opens it anew
            await playing

        with pytest.raises(BatchRefused, match="does not open this path"):
            shard.play(closed)


def test_a_failed_task_logs_no_token(two_workers: HandCluster, cluster: DaskCluster) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(PassingError) as raised:
        asyncio.run(cluster.play(nobody, "train-00000.0", TOKEN))
    assert isinstance(raised.value, PassingError)
    assert f"could not reach the door at {nobody} for the batch" in str(raised.value)
    assert "give a rollouts.door that every worker reaches" in str(raised.value)
    logs = two_workers.log("one") + two_workers.log("two")
    assert "Compute Failed" in logs
    assert TOKEN not in logs + two_workers.log("scheduler")


@pytest.mark.story
def test_a_batch_that_is_cancelled_is_withdrawn(tmp_path: Path, cluster: DaskCluster) -> None:
    examples = [{"number": 0, "calls": 1000}]
    with PlayedShard(tmp_path, AGENT, examples, batches=1) as shard:

        async def cancelled(door: str, batch: str, token: str) -> None:
            playing = asyncio.create_task(cluster.play(door, batch, token))
            while not shard.sampler.answered:
                await asyncio.sleep(0.05)
            await cancel_and_wait(playing)
            assert playing.cancelled()
            raise InterruptedError

        with pytest.raises(InterruptedError):
            shard.play(cancelled)
    assert shard.ends() == []
    assert len(shard.sampler.answered) < 1000
