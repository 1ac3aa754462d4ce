"""Hosts that die, lose their network and come late while a run trains on them, and a dead flow."""

from pathlib import Path

import pytest

pytest.importorskip("distributed", reason="Dask is not installed: make setup")

from benchmarks.interruptions import two_hosts
from benchmarks.servers import hosts

pytestmark = [
    pytest.mark.story,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not hosts.permitted(), reason=hosts.MISSING),
]


def test_hosts_come_and_go_and_the_datums_are_those_of_threads(tmp_path: Path) -> None:
    with two_hosts.cluster(tmp_path) as made:
        seconds = two_hosts.play_scenes(made, tmp_path)
    assert len(seconds) == 6
    assert max(seconds.values()) < two_hosts.WAITING_SECONDS


def test_a_poisonous_agent_on_other_hosts_costs_only_its_own_rollout(tmp_path: Path) -> None:
    with two_hosts.cluster(tmp_path) as made:
        failed = two_hosts.play_poison(made, tmp_path)
    [span] = failed
    assert span["error_type"] == "AgentExit"
    assert span["rollout_id"].endswith("-00")
    assert span["attributes"]["example"]["poison"]
