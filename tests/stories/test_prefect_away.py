"""Prefect's server goes away during a run, cannot write, or is killed: the run goes on."""

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest

from benchmarks.interruptions import killable_runs
from ratchet.adapters.errors import UserError
from ratchet.flows.cli.training import explain_absence
from ratchet.tasks.recording.step_log import read_metrics
from ratchet.tasks.storage.run_folder import RunFolder
from tests.support.processes import wait_until
from tests.support.runs.small_recipe import small_recipe
from tests.support.servers.prefect_team import (
    answers,
    create_flow_run,
    open_team,
    prefect_api,
    wait_for_end,
)

pytestmark = pytest.mark.story

ROOT = Path(__file__).parents[2]
PREFECT = str(Path(sys.executable).with_name("prefect"))
AWAY_SECONDS = 15
PATIENCE_SECONDS = 200
PROGRAM = """
from ratchet.flows.train import train
from tests.support.runs.small_recipe import small_recipe

train(small_recipe(steps=3, evaluation={"examples": 1, "greedy": False}), run="away")
"""


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ours = ("PREFECT_", "TINKER_")
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(ours)},
        "PREFECT_HOME": str(tmp_path / "home"),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "RATCHET_RUNS": str(tmp_path / "runs"),
        "PYTHONPATH": str(ROOT),
    }


@contextmanager
def server(variables: dict[str, str], log: Path) -> Iterator[httpx.Client]:
    url = httpx.URL(variables["PREFECT_API_URL"])
    command = [PREFECT, "server", "start", "--host", "127.0.0.1", "--port", str(url.port)]
    with (
        log.open("ab") as output,
        subprocess.Popen(command, env=variables, stdout=output, stderr=output) as process,
        prefect_api(str(url)) as api,
    ):
        try:
            wait_until("Prefect's start", lambda: answers(api), PATIENCE_SECONDS)
            yield api
        finally:
            process.kill()


def begins(folder: Path, run: "subprocess.Popen[bytes]") -> Callable[[], bool]:
    """Return what tells whether a run plays, or has ended too early."""
    return lambda: (folder / "journal").exists() or run.poll() is not None


def has_another_server(training: killable_runs.Training, killed: int) -> bool:
    return training.children(" -m ratchet.flows.server.embedded_program") not in ([], [killed])


def assert_whole(folder: Path, api: httpx.Client) -> None:
    """It completed, and each of its updates was applied once."""
    states = [found["state"]["type"] for found in api.post("/flow_runs/filter").json()]
    assert states == ["COMPLETED"]
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == [0, 1, 2]
    phases = [json.loads(line) for line in (folder / "checkpoints.jsonl").read_text().splitlines()]
    assert [line["step"] for line in phases if line["phase"] == "intent"] == [1, 2, 3]


def test_a_run_outlives_the_absence_of_the_prefect_server(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    folder, log = tmp_path / "runs" / "away", tmp_path / "log"
    with log.open("wb") as output:
        with server(variables, tmp_path / "server.log"):
            run = subprocess.Popen(
                [sys.executable, "-c", PROGRAM], env=variables, stdout=output, stderr=output
            )
            wait_until("the first rollout", begins(folder, run), PATIENCE_SECONDS)
        time.sleep(AWAY_SECONDS)
        with server(variables, tmp_path / "server.log") as api:
            assert run.wait(PATIENCE_SECONDS) == 0, log.read_text()[-3000:]
            assert_whole(folder, api)


def test_a_run_outlives_a_database_of_the_prefect_server_that_somebody_has_locked(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    folder, log = tmp_path / "runs" / "away", tmp_path / "log"
    with log.open("wb") as output, server(variables, tmp_path / "server.log") as api:
        run = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], env=variables, stdout=output, stderr=output
        )
        wait_until("the first rollout", begins(folder, run), PATIENCE_SECONDS)
        database = Path(variables["PREFECT_HOME"]) / "prefect.db"
        with closing(sqlite3.connect(database, isolation_level=None)) as another:
            another.execute("BEGIN IMMEDIATE")
            time.sleep(AWAY_SECONDS)
            another.execute("ROLLBACK")
        assert run.wait(PATIENCE_SECONDS) == 0, log.read_text()[-3000:]
        assert_whole(folder, api)


def test_an_embedded_server_that_is_killed_is_started_again(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    run = RunFolder(tmp_path / "runs" / "away")
    embedded = {name: value for name, value in variables.items() if name != "PREFECT_API_URL"}
    settings = ("steps=3", "rollouts.groups=4", "evaluation.examples=2", "evaluation.every=0")
    training = killable_runs.train(run, settings, embedded)
    for size in (1, 20_000):
        assert training.writes(size)
        (server,) = training.children(" -m ratchet.flows.server.embedded_program")
        os.kill(server, signal.SIGKILL)
        started = partial(has_another_server, training, server)
        wait_until("the server's second start", started, PATIENCE_SECONDS)
    log = killable_runs.log_of(run)
    assert training.exit_code() == 0, log.read_text()[-3000:]
    assert [row["step"] for row in read_metrics(run.metrics)] == [0, 1, 2]
    said = [line for line in log.read_text().splitlines() if "WARNING" in line]
    assert sum("is started again" in line for line in said) == 2, said


def test_a_run_of_a_worker_outlives_the_absence_of_its_server(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    ratchet = [sys.executable, "-m", "ratchet.flows.cli.main"]
    journal = tmp_path / "runs" / "away" / "journal"
    with open_team(ratchet, ROOT, tmp_path, variables, "hello") as api:
        (deployed,) = api.post("/deployments/filter").json()
        recipe = small_recipe(steps=6).model_dump(mode="json")
        flow_run = create_flow_run(api, deployed["id"], {"recipe": recipe, "run": "away"})
        wait_until("the first rollout", journal.exists, PATIENCE_SECONDS)
        (server,) = (
            child
            for child in psutil.Process().children()
            if {"server", str(api.base_url.port)} <= {*child.cmdline()}
        )
        command, environment = server.cmdline(), server.environ()
        server.kill()
        time.sleep(AWAY_SECONDS)
        again = subprocess.Popen(command, env=environment, cwd=tmp_path)
        try:
            wait_until("Prefect's start", lambda: answers(api), PATIENCE_SECONDS)
            assert wait_for_end(api, flow_run)["state"]["type"] == "COMPLETED"
        finally:
            again.kill()


def test_a_server_that_stays_away_ends_the_command_with_a_sentence() -> None:
    request = httpx.Request("POST", "http://127.0.0.1:4200/api/flow_runs")
    away = r"4200/api/flow_runs does not answer \(refused\).*; then run `ratchet resume one`"
    with pytest.raises(UserError, match=away), explain_absence(lambda: "run `ratchet resume one`"):
        raise httpx.ConnectError("refused", request=request)
