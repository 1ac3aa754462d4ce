"""A Dask cluster by hand: workers that come late, a scheduler and a flow that are killed."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("distributed", reason="Dask is not installed: make setup")

from prefect import flow

from ratchet.adapters.errors import PassingError
from ratchet.adapters.harness import dask_cluster
from ratchet.adapters.harness.dask_cluster import open_cluster
from ratchet.adapters.network.addresses import Listener
from ratchet.tasks.rollouts import collect_rollouts
from ratchet.tasks.storage.names import ShardBatch
from tests.support.door.played_shard import AGENT, SLOW, PlayedShard
from tests.support.processes import ROOT, free_port, wait_until
from tests.support.servers.dask_by_hand import HandCluster, by_hand

pytestmark = pytest.mark.story


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[HandCluster]:
    """A cluster by hand with a scheduler and one worker of one thread."""
    with by_hand(tmp_path / "dask", {"one": 1}) as cluster:
        yield cluster


def test_a_worker_that_comes_late_takes_its_share(tmp_path: Path, cluster: HandCluster) -> None:
    players = tmp_path / "players"
    examples = [example | {"player": str(players)} for example in SLOW]
    with (
        PlayedShard(tmp_path / "run", AGENT, examples, batches=8) as shard,
        ThreadPoolExecutor(1) as thread,
        open_cluster(cluster.address, 8) as opened,
    ):
        playing = thread.submit(shard.play, opened.play)
        wait_until("a rollout", players.exists)
        cluster.start_worker("late", 2)
        playing.result()
    processes = [line.split()[0] for line in players.read_text().splitlines()]
    assert len({*processes}) == 2
    assert min(processes.count(process) for process in {*processes}) >= 4
    assert {end["attempt"] for end in shard.ends()} == {0}


def test_a_cluster_without_a_worker_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dask_cluster, "CLUSTER_LOOK_SECONDS", 0.1)
    monkeypatch.setattr("ratchet.adapters.process.clock.FIRST_WORD_SECONDS", 0.3)
    with (
        by_hand(tmp_path / "dask", {}) as cluster,
        PlayedShard(tmp_path / "run", AGENT, SLOW[:1], batches=1) as shard,
        ThreadPoolExecutor(1) as thread,
        open_cluster(cluster.address, 1) as opened,
    ):
        playing = thread.submit(shard.play, opened.play)
        what = f"waiting for a worker of the Dask cluster at {cluster.address}"
        wait_until("a word", lambda: what in caplog.text)
        cluster.start_worker("late")
        playing.result()
    assert len(shard.ends()) == 2


@pytest.mark.usefixtures("prefect_server")
def test_a_scheduler_that_is_killed_and_started_again_costs_a_retry(
    tmp_path: Path, cluster: HandCluster
) -> None:
    with (
        PlayedShard(tmp_path / "run", AGENT, SLOW, batches=1) as shard,
        open_cluster(cluster.address, 1) as opened,
    ):

        @flow
        def play() -> None:
            batch = ShardBatch("train-00000", 0, group_size=2)
            path = shard.run.spans(batch.name)
            collect_rollouts(path, shard.path, batch, shard.server, shard.sampled_by, opened.play)

        with ThreadPoolExecutor(1) as thread:
            playing = thread.submit(play)
            wait_until("ends", lambda: len(shard.ends()) >= 2)
            before = {end["span_id"] for end in shard.ends()}
            cluster.kill("scheduler")
            cluster.start_scheduler()
            cluster.start_worker("two")
            playing.result()
    ends = shard.ends()
    assert len(ends) == len({end["rollout_id"] for end in ends}) == 16
    assert before <= {end["span_id"] for end in ends}
    assert set(shard.sampler.answered.values()) == {1}


def test_a_lost_scheduler_is_an_error_that_may_pass(tmp_path: Path, cluster: HandCluster) -> None:
    with (
        PlayedShard(tmp_path / "run", AGENT, SLOW, batches=1) as shard,
        ThreadPoolExecutor(1) as thread,
        open_cluster(cluster.address, 1) as opened,
    ):
        playing = thread.submit(shard.play, opened.play)
        wait_until("a call", lambda: len(shard.sampler.answered) > 0)
        cluster.kill("scheduler")
        with pytest.raises(PassingError, match=r"lost the batch train-00000\.0 .*look at the logs"):
            playing.result()


def test_a_scheduler_that_nobody_started_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dask_cluster, "CONNECT_SECONDS", 1.0)
    address = f"tcp://127.0.0.1:{free_port()}"
    with (
        pytest.raises(PassingError, match=f"no Dask scheduler answers at {address}"),
        open_cluster(address, 1),
    ):
        pass


def test_the_worker_of_a_killed_flow_is_refused_by_the_flow_that_resumes(
    tmp_path: Path, cluster: HandCluster
) -> None:
    """The orphan's door comes back at the same port, with the same batch and another token."""
    port = free_port()
    first = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.support.agents.dask_flow",
            str(tmp_path / "run"),
            cluster.address,
            str(port),
        ],
        cwd=ROOT,
    )
    try:
        watched = PlayedShard(tmp_path / "run", AGENT, SLOW, batches=1)
        wait_until("two ends", lambda: len(watched.ends()) >= 2)
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    before = watched.spans()
    with (
        PlayedShard(tmp_path / "run", AGENT, SLOW, 1, Listener(port=port)) as shard,
        open_cluster(cluster.address, 1) as opened,
    ):
        shard.play(opened.play)
    ends = shard.ends()
    assert len(ends) == len({end["rollout_id"] for end in ends}) == 16
    recorded = {span["gen_ai_request_seed"] for span in before if span["kind"] == "llm"}
    assert set(shard.sampler.answered).isdisjoint(recorded)
    assert set(shard.sampler.answered.values()) == {1}
    later = [span for span in shard.spans()[len(before) :] if span["kind"] != "begun"]
    assert {span["attempt"] for span in later} == {1}
