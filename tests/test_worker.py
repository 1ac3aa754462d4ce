"""Workers come when they like, are killed, and leave no trace in what is trained."""

import os
import signal
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from adapters import leases
from flows.train import train
from tasks.journal import read_journal
from tests.engine_server import Address
from tests.small_recipe import small_recipe, with_fault
from tests.test_faults import engine, result_of

ROOT = Path(__file__).parent.parent
WORKER = [sys.executable, "-m", "flows.cli", "worker", "--concurrency", "2"]

pytestmark = pytest.mark.usefixtures("prefect_server")
__all__ = ["engine"]


def trained(run: str, project: Path, **rollouts: Any) -> Path:
    """The folder of a run whose rollouts are played as these say."""
    recipe = small_recipe(
        agent="tests.killed_agent:play",
        dataset={"path": str(project / "examples.jsonl")},
        rollouts={"groups": 4, "group_size": 2, "max_tokens": 8, **rollouts},
        evaluation={"examples": 2, "greedy": False},
    )
    train(recipe, run=run)
    return project / "runs" / run


@pytest.fixture(scope="module")
def project(
    tmp_path_factory: pytest.TempPathFactory, engine: Address, prefect_server: None
) -> Iterator[Path]:
    """A folder with a run in one process, `alone`."""
    project = tmp_path_factory.mktemp("project")
    with_fault(project, "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RATCHET_RUNS", str(project / "runs"))
        patch.setenv("TINKER_BASE_URL", engine.url)
        patch.setenv("TINKER_API_KEY", engine.key)
        trained("alone", project)
        yield project


@pytest.fixture
def killing(project: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """The folder that tells the agent whom to kill, and where it says that it did."""
    victims, flag = project / request.param, project / "flag"
    victims.mkdir()
    flag.unlink()
    flag.symlink_to(victims)
    yield victims
    flag.unlink()
    flag.touch()


def spans(run: Path, kind: str) -> list[dict[str, Any]]:
    journals = sorted(run.glob("journal/*.jsonl"))
    return [span for path in journals for span in read_journal(path) if span["kind"] == kind]


def ended_by(run: Path) -> Counter[str]:
    """How many rollouts each player has ended."""
    return Counter(end["attributes"]["player"] for end in spans(run, "reward"))


@pytest.mark.parametrize("killing", ["process"], indirect=True)
def test_a_pool_of_which_a_process_is_killed_trains_what_one_process_does(
    project: Path, engine: Address, killing: Path
) -> None:
    run = trained("pool", project, where="processes", processes=2)
    assert result_of(run, engine) == result_of(project / "runs" / "alone", engine)
    killed = (killing / "killed").read_text()
    assert len(ended_by(run)) > 2
    assert ended_by(run)[f"process {killed}"] > 0
    assert any(call["replayed"] for call in spans(run, "llm"))
    assert not spans(run, "error")


@pytest.mark.parametrize("killing", ["worker"], indirect=True)
def test_workers_that_come_late_and_of_which_one_is_killed_train_what_one_process_does(
    project: Path, engine: Address, killing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "LEASE_SECONDS", 3.0)
    with ThreadPoolExecutor() as threads:
        coming = threads.submit(two_workers, project, project / "runs" / "team" / "door.json")
        run = trained("team", project, where="workers")
        workers = coming.result()
    killed, survivor = sorted(workers, key=lambda worker: worker.poll() is None)
    survivor.terminate()
    assert (killed.wait(60), survivor.wait(60)) == (-signal.SIGKILL, 0)

    assert result_of(run, engine) == result_of(project / "runs" / "alone", engine)
    names = {name.rpartition("-")[2]: count for name, count in ended_by(run).items()}
    assert names.keys() == {str(killed.pid), str(survivor.pid)}
    assert any(call["replayed"] for call in spans(run, "llm"))
    assert not spans(run, "error")
    assert not (run / "door.json").exists()


def two_workers(project: Path, door: Path) -> list[subprocess.Popen[bytes]]:
    """Once the run wants them."""
    while not door.exists():
        sleep(0.05)
    assert stat.S_IMODE(door.stat().st_mode) == 0o600
    paths = {"RATCHET_RUNS": str(project / "runs"), "PYTHONPATH": str(ROOT)}
    environment = {**os.environ, **paths}
    return [subprocess.Popen(WORKER, cwd=project, env=environment) for _ in range(2)]
