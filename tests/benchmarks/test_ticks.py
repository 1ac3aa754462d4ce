"""The stand-in for a service that works in cycles, and Ratchet's loop on it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.ticks.cycles import LATENCY_SECONDS, CyclingService, JumpingLoop, Times
from benchmarks.ticks.our_loops import train
from tasks.checkpoints import Ledger
from tasks.storage.arrivals import ArrivalLedger
from tasks.storage.logs import read_log
from tasks.storage.run_folder import RunFolder
from tasks.storage.tables import read_table

SMALL = {"groups": 2, "group_size": 2, "batches": 2}


@pytest.fixture
def loop() -> Iterator[JumpingLoop]:
    jumping = JumpingLoop()
    yield jumping
    jumping.close()


def test_an_optimizer_step_that_follows_its_pass_at_once_shares_its_cycle(
    loop: JumpingLoop,
) -> None:
    service = CyclingService(loop, datums=4)
    service.forward_backward(4)
    loop.run_until_complete(service.optim_step())
    assert service.carried == [1]
    assert loop.time() == 20 + LATENCY_SECONDS


def test_an_optimizer_step_that_waits_for_its_pass_has_a_later_cycle(loop: JumpingLoop) -> None:
    service = CyclingService(loop, datums=4)
    loop.run_until_complete(service.forward_backward(4))
    loop.run_until_complete(service.optim_step())
    assert service.carried == [1, 3]


def test_a_cycle_carries_as_many_datums_as_it_has_room_for_and_one_optimizer_step(
    loop: JumpingLoop,
) -> None:
    service = CyclingService(loop, datums=4)
    service.forward_backward(6)
    service.optim_step()
    service.forward_backward(6)
    loop.run_until_complete(service.optim_step())
    assert service.carried == [1, 2, 3, 4]
    assert service.steps == 2


def test_a_save_holds_what_was_carried_before_it(loop: JumpingLoop) -> None:
    service = CyclingService(loop, datums=4)
    service.forward_backward(8)
    service.optim_step()
    loop.run_until_complete(service.save())
    assert service.carried == [1, 2]
    loop.run_until_complete(service.save())
    assert loop.time() == 30 + 3 * LATENCY_SECONDS


def test_a_loop_that_waits_for_nothing_says_so(
    loop: JumpingLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.ticks.cycles.STUCK_SECONDS", 0.0)
    never = loop.create_future()
    with pytest.raises(RuntimeError, match="nothing is to come"):
        loop.run_until_complete(never)


@pytest.mark.parametrize("stream", [False, True])
def test_the_loop_with_a_lag_samples_by_its_checkpoints_and_leaves_fewer_cycles_idle(
    tmp_path: Path, stream: bool
) -> None:
    settings = {"steps": 4, "rollouts": {**SMALL, "lag": 1, "stream": stream}}
    at_once = train(tmp_path / "synchronous", {"steps": 4, "rollouts": SMALL}, 1, Times())
    lagged = train(tmp_path / "lagged", settings, 1, Times())
    assert lagged["busy"] > at_once["busy"]
    assert lagged["seconds"] < at_once["seconds"]
    run = RunFolder(tmp_path / "lagged" / "run")
    versions = [read_table(run.datums("policy", step), ["policy_version"]) for step in range(4)]
    assert [{*table["policy_version"].to_pylist()} for table in versions] == [
        {"00000"},
        {"00000"},
        {"00001"},
        {"00002"},
    ]


def test_the_same_loop_takes_the_same_virtual_time(tmp_path: Path) -> None:
    settings = {"steps": 3, "rollouts": {**SMALL, "lag": 1, "order": "arrival"}}
    first, second = (train(tmp_path / name, settings, 1, Times()) for name in ("a", "b"))
    assert first == second
    made = ArrivalLedger(RunFolder(tmp_path / "a" / "run").arrivals).steps()
    assert [*made] == [0, 1, 2]


@pytest.mark.parametrize("lag", [1, 2])
def test_with_a_lag_short_rollouts_leave_no_cycle_idle(tmp_path: Path, lag: int) -> None:
    settings, times = {"steps": 6, "rollouts": {**SMALL, "lag": lag}}, Times(median=0.5)
    measured = train(tmp_path / "a", settings, 4, times)
    assert measured["busy"] == 1
    ledger = Ledger(RunFolder(tmp_path / "a" / "run").checkpoints("policy"))
    rows = [(row["phase"], row["step"]) for row in read_log(ledger.path)]
    assert rows[:4] == [("saved", 0), ("intent", 1), ("intent", 2), ("saved", 1)]
