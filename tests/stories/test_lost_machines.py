"""A machine that trains for a team is lost with all of its files: another one goes on."""

from pathlib import Path
from random import Random

import pytest

pytest.importorskip("distributed", reason="Dask is not installed: make setup")

from benchmarks.interruptions import lost_machines
from benchmarks.servers import hosts
from benchmarks.servers.postgres import MISSING, find_programs
from tests.support.stores.object_store import find_weed

pytestmark = [
    pytest.mark.story,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not hosts.permitted(), reason=hosts.MISSING),
    pytest.mark.skipif(find_programs() is None, reason=MISSING),
    pytest.mark.skipif(not find_weed().exists(), reason="SeaweedFS has no wheel for this system"),
]


def test_another_machine_goes_on_to_the_same_bytes_by_retry(tmp_path: Path) -> None:
    with lost_machines.open_team(tmp_path) as team:
        lost_machines.train(team, "talks", kills=1, random=Random(0))
    [(faults, _)] = team.verdicts.values()
    assert faults == []
    assert team.hosts_that_played() == {lost_machines.PLAYERS, lost_machines.SERVER}
    [loss] = team.losses
    assert loss.way == lost_machines.RETRY
    assert loss.first_token is not None
