"""A team's Prefect server on PostgreSQL: what docs/prefect.md promises of one on SQLite holds."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.servers.postgres import MISSING, Postgres, find_programs, running_postgres
from tests.support.processes import ROOT, wait_until
from tests.support.runs.small_recipe import small_recipe, with_faults
from tests.support.servers.prefect_team import (
    RUNNING_SECONDS,
    answers,
    create_flow_run,
    open_team,
    read_log,
    retry,
    run_deployment,
    wait_for_end,
    wait_for_schedule,
)

pytestmark = [
    pytest.mark.story,
    pytest.mark.skipif(find_programs() is None, reason=MISSING),
]

RATCHET = [sys.executable, "-m", "ratchet.flows.cli.main"]
AWAY_SECONDS = 12


@dataclass(frozen=True)
class Team:
    """A server on PostgreSQL, its API, a deployment on it, and the folder of what it all writes."""

    api: httpx.Client
    database: Postgres
    deployment: str
    folder: Path

    def create(self, run: str, **changes: Any) -> str:
        """Create a flow run of a small recipe, which a worker is to begin."""
        return create_flow_run(self.api, self.deployment, _parameters(run, **changes))

    def steps(self, run: str) -> int:
        file = self.folder / "runs" / run / "metrics.jsonl"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def said(self, of: str) -> str:
        return (self.folder / f"{of}.log").read_text()

    def has_state(self, flow_run: str, name: str) -> bool:
        return self.api.get(f"/flow_runs/{flow_run}").json()["state"]["name"] == name


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    folder = tmp_path_factory.mktemp("team")
    variables = {**os.environ, "RATCHET_RUNS": str(folder / "runs")}
    with (
        TemporaryDirectory() as files,  # a user other than root must reach it
        running_postgres(Path(files)) as database,
        open_team(RATCHET, ROOT, folder, variables, "hello-swept", database.url) as api,
    ):
        deployment = api.get("/deployments/name/train/hello-swept").json()["id"]
        yield Team(api, database, deployment, folder)


def test_a_run_ends_whose_database_is_away_and_the_terminals_say_so_in_one_line(
    team: Team,
) -> None:
    flow_run = team.create("away", steps=12)
    wait_until("the sixth step", lambda: team.steps("away") >= 6, RUNNING_SECONDS)
    team.database.stop("immediate")
    time.sleep(AWAY_SECONDS)
    assert team.steps("away") == 12, "a run needs no database to train"
    team.database.start()
    ended = wait_for_end(team.api, flow_run)
    assert ended["state"]["type"] == "COMPLETED", read_log(team.api, flow_run)
    _, _, after = team.said("server").partition("Check out the dashboard")
    assert [line.split(" - ")[-1][:34] for line in after.splitlines()[1:] if line.strip()] == [
        "the database 127.0.0.1 does not an"
    ], after
    assert "Traceback" not in team.said("worker")


def test_a_schedule_starts_a_run(team: Team) -> None:
    path = f"/deployments/{team.deployment}/schedules"
    every = {"schedule": {"interval": 20}, "parameters": _parameters(None), "active": True}
    team.api.post(path, json=[every]).raise_for_status()
    team.api.post(f"/deployments/{team.deployment}/resume_deployment").raise_for_status()
    ended = wait_for_schedule(team.api, team.deployment)
    assert ended["state"]["type"] == "COMPLETED", read_log(team.api, ended["id"])
    for of in team.api.get(path).json():
        team.api.delete(f"{path}/{of['id']}").raise_for_status()
    team.api.post(f"/deployments/{team.deployment}/resume_deployment").raise_for_status()


def test_a_run_that_has_spent_its_budget_is_suspended_until_resume(team: Team) -> None:
    flow_run = team.create("spent", budget={"tokens": 1})
    wait_until("it waits", lambda: team.has_state(flow_run, "Suspended"), RUNNING_SECONDS)
    larger = {"run_input": {"tokens": 1_000_000}}
    team.api.post(f"/flow_runs/{flow_run}/resume", json=larger).raise_for_status()
    ended = wait_for_end(team.api, flow_run)
    assert (ended["state"]["type"], team.steps("spent")) == ("COMPLETED", 2)


def test_another_worker_retries_a_run_that_a_dead_one_has_left(
    team: Team, kill: Callable[[str], None], tmp_path: Path
) -> None:
    given = _parameters("retried", **with_faults(tmp_path, "kill"))
    crashed = run_deployment(team.api, team.deployment, given)
    assert (crashed["state"]["type"], team.steps("retried")) == ("CRASHED", 1)
    kill("worker")
    done = retry(team.api, crashed)
    assert (done["state"]["type"], done["run_count"]) == ("COMPLETED", 2)
    assert team.steps("retried") == 2


def test_as_many_runs_as_the_pool_allows_outlive_a_killed_server(
    team: Team, kill: Callable[[str], None]
) -> None:
    limit = {"concurrency_limit": 2}
    team.api.patch("/work_pools/ratchet", json=limit).raise_for_status()
    names = ("first", "second", "third")
    flow_runs = [team.create(name, steps=8) for name in names]
    wait_until("two train", lambda: sum(0 < team.steps(n) < 8 for n in names) == 2, RUNNING_SECONDS)
    kill("server")
    ended = [wait_for_end(team.api, flow_run) for flow_run in flow_runs]
    times = [(one["start_time"], one["end_time"]) for one in ended]
    assert [one["state"]["type"] for one in ended] == ["COMPLETED"] * 3
    at_once = [sum(begin <= at < end for begin, end in times) for at, _ in times]
    assert max(at_once) == 2, times


@pytest.fixture(scope="module")
def kill(team: Team) -> Iterator[Callable[[str], None]]:
    """Kill the team's server or worker, and start another one by the same command."""
    with ExitStack() as stack:

        def kill(word: str) -> None:
            (old,) = (one for one in psutil.Process().children() if word in one.cmdline())
            command, environment = old.cmdline(), old.environ()
            old.kill()
            old.wait()
            new = stack.enter_context(subprocess.Popen(command, env=environment, cwd=ROOT))
            stack.callback(new.terminate)
            wait_until(f"the {word} is back", lambda: answers(team.api), RUNNING_SECONDS)

        yield kill


def _parameters(run: str | None, **changes: Any) -> dict[str, Any]:
    return {"recipe": small_recipe(**changes).model_dump(mode="json"), "run": run}
